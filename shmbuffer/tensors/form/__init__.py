"""The form of the data: taken apart into leaves, checked, described, and put together."""
