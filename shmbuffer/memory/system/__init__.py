"""The operating system: files, pages, time and processes. No module here knows what a buffer is."""
