"""Where a buffer is: the files of its directory, its locks and its clients."""
