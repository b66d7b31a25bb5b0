"""Several buffers that are used like one buffer.

ensemble            an ensemble of buffers: each row of a sample comes from one of the buffers
offline_to_online   a data set and collected items under one index, sampled in fixed shares
joint_buffer        the methods that both kinds of buffers have in common
joint_parts         TorchRL's storage and writer for several buffers
sampler_ensemble    TorchRL's sampler for several buffers, which chooses the buffers of a batch
joint_rows          divides a sample, or data to write, among the buffers
one_batch           gathers rows of several buffers in one batch without a second copy
turns               applies the rate limiters and queues of the buffers
"""
