"""Several buffers as one: `ReplayBufferEnsemble`, and its storages, samplers and writers.

offline_to_online  ──▶ a data set and what is collected, mixed (two_parts: under one index)
buffers    ──▶ what is done to all of them; writes, each item into one
ensemble   ──▶ samples: rows, each from one buffer (turns, where buffers are limited)
storage, sampler, writer   TorchRL's three parts: views of the members' (members)
stacked_rows ──▶ what belongs to which buffer
"""

from shmbuffer.ensembles.ensemble import ReplayBufferEnsemble
from shmbuffer.ensembles.offline_to_online import OfflineToOnlineReplayBuffer
from shmbuffer.ensembles.sampler import SamplerEnsemble
from shmbuffer.ensembles.storage import StorageEnsemble, StorageEnsembleCheckpointer
from shmbuffer.ensembles.writer import WriterEnsemble

__all__ = [
    "OfflineToOnlineReplayBuffer",
    "ReplayBufferEnsemble",
    "SamplerEnsemble",
    "StorageEnsemble",
    "StorageEnsembleCheckpointer",
    "WriterEnsemble",
]
