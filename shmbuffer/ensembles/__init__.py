"""Several buffers as one: ensembles, and data sets combined with collected items.

ensemble            samples with rows from several buffers; writes that select one buffer per item
offline_to_online   a data set and collected items under one index, sampled in fixed shares
joint_buffer        the methods that both have in common
joint_parts         TorchRL's storage and writer: views of the members' parts
sampler_ensemble    TorchRL's sampler, which chooses the buffers of a batch
joint_rows          the part of a sample, or of data to write, that belongs to each buffer
turns               rate limiters and queues of the buffers
"""
