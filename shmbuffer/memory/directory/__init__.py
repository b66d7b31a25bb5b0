"""Creates, diagnoses, extends and removes the files of a buffer."""
