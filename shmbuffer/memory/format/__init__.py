"""What each shared byte means, and the files that hold them."""
