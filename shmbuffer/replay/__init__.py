"""What is replayed: TorchRL's family of buffers on the engine."""
