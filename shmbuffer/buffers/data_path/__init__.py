"""The storage, sampler, writer and transforms of a buffer, and the path of data through them."""
