"""The documentation is true: what it shows runs, what it names is there."""
