"""Access to the operating system: files, pages, time and processes.

No module in this folder depends on the structure of a buffer.
"""
