"""What is replayed.

TorchRL's family of buffers on the engine. Knows no file format and no process.
"""
