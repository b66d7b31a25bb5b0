"""The documentation is correct: its examples run, and the files and tests that it names exist."""
