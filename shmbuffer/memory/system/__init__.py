"""The operating system: files, pages, time, processes. Nothing here knows a buffer."""
