"""Takes data apart into the leaves of an item and puts them together, without torch."""
