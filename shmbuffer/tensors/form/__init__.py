"""The structure of data: splits it into leaves, checks and describes them, and rebuilds it."""
