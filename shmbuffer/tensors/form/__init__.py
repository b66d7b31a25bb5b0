"""The structure of data: splitting into leaves, validation, description, and reassembly."""
