"""Samplers, which choose the items of a batch. Each module has one sampler or one shared helper."""
