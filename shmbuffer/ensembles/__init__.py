"""Several buffers as one: ensembles, and data sets mixed with collected items.

ensemble            samples whose rows are each from one buffer; writes, each item into one buffer
offline_to_online   a data set and collected items under one index, sampled in fixed shares
joint_buffer        the calls that both have in common
joint_parts         TorchRL's storage and writer: views of the members' parts
sampler_ensemble    TorchRL's sampler: chooses the buffers of a batch
joint_rows          the part of a sample, or of data to write, that belongs to each buffer
turns               rate limiters and queues of the buffers
"""
