"""What the operating system gives: files, pages, time, processes. Nothing here knows a buffer."""
