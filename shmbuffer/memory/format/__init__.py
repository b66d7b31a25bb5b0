"""The meaning of each shared byte."""
