"""The meaning of each shared byte, and the files that contain them."""
