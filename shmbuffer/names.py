"""The public names of the package, and the module that each is loaded from on first use."""

from __future__ import annotations

import importlib
from typing import Any

from shmbuffer import errors

LISTED = {
    "shmbuffer.buffers": (
        "HERReplayBuffer",
        "PrioritizedReplayBuffer",
        "ReplayBuffer",
        "TensorDictPrioritizedReplayBuffer",
        "TensorDictReplayBuffer",
    ),
    "shmbuffer.buffers.schedulers": ("LinearScheduler",),
    "shmbuffer.datasets": (
        "load_dataset",
        "prefill_replay_buffer",
    ),
    "shmbuffer.distributed": (
        "RayReplayBuffer",
        "RemoteTensorDictReplayBuffer",
        "ShardedReplayBuffer",
    ),
    "shmbuffer.ensembles": (
        "OfflineToOnlineReplayBuffer",
        "ReplayBufferEnsemble",
    ),
    "shmbuffer.environments": ("Recorder",),
    "shmbuffer.memory.format.limiter": ("RateLimiter",),
    "shmbuffer.memory.weights": ("Weights",),
    "shmbuffer.samplers": (
        "ConsumingSampler",
        "PrioritizedSampler",
        "PrioritizedSliceSampler",
        "PriorityUpdate",
        "PromptGroupSampler",
        "RandomSampler",
        "SamplerWithoutReplacement",
        "SliceSampler",
        "SliceSamplerWithoutReplacement",
        "StalenessAwareSampler",
        "StreamingSliceSampler",
    ),
    "shmbuffer.service.client": ("attach",),
    "shmbuffer.service.coordinator": ("Coordinator",),
    "shmbuffer.service.recovery": (
        "RecoveryReport",
        "recover",
    ),
    "shmbuffer.storages": (
        "CompressedListStorage",
        "LazyMemmapStorage",
        "LazyStackStorage",
        "LazyTensorStorage",
        "ListStorage",
        "ReadOnlyStorage",
    ),
    "shmbuffer.units": (
        "FrameStack",
        "NStep",
        "Sequence",
    ),
    "shmbuffer.writers": (
        "ImmutableDatasetWriter",
        "TensorDictMaxValueWriter",
    ),
}
"""The names that the guides use, by module: ``__all__``, with a few errors."""

OTHERS = {
    "shmbuffer.buffers": (
        "ConditionalUpdateResult",
        "HindsightStrategy",
        "Reservation",
    ),
    "shmbuffer.buffers.schedulers": (
        "LambdaScheduler",
        "ParameterScheduler",
        "SchedulerList",
        "StepScheduler",
    ),
    "shmbuffer.ensembles": (
        "SamplerEnsemble",
        "StorageEnsemble",
        "StorageEnsembleCheckpointer",
        "WriterEnsemble",
    ),
    "shmbuffer.memory.directory.partials": ("Partial",),
    "shmbuffer.memory.flow.consumer_status": (
        "ConsumerStatus",
        "HeldItems",
    ),
    "shmbuffer.memory.format.ledger": ("Acknowledged",),
    "shmbuffer.memory.system.progress": ("ProgressReport",),
    "shmbuffer.memory.system.threads": ("set_threads",),
    "shmbuffer.samplers": (
        "GroupCounts",
        "MinSegmentTreeFp32",
        "MinSegmentTreeFp64",
        "Sampler",
        "SumSegmentTreeFp32",
        "SumSegmentTreeFp64",
    ),
    "shmbuffer.saves.checkpointers": (
        "CompressedListStorageCheckpointer",
        "FlatStorageCheckpointer",
        "H5StorageCheckpointer",
        "ListStorageCheckpointer",
        "NestedStorageCheckpointer",
        "StorageCheckpointerBase",
        "TensorStorageCheckpointer",
    ),
    "shmbuffer.storages": (
        "Storage",
        "TensorStorage",
    ),
    "shmbuffer.tensors.records.ragged": (
        "densify",
        "pad",
    ),
    "shmbuffer.torchrl.functions": (
        "DEFAULT_DONE_KEYS",
        "find_start_stop_traj",
        "pin_memory_output",
        "tree_iter",
        "unravel_index",
    ),
    "shmbuffer.torchrl.ted": (
        "Flat2TED",
        "H5Combine",
        "H5Split",
        "Nested2TED",
        "TED2Flat",
        "TED2Nested",
    ),
    "shmbuffer.torchrl.transforms": ("Compose",),
    "shmbuffer.units": (
        "SampleUnit",
        "Transition",
    ),
    "shmbuffer.watch.loggers": ("log_stats",),
    "shmbuffer.writers": (
        "RoundRobinWriter",
        "TensorDictRoundRobinWriter",
        "Writer",
    ),
}
"""All other names of TorchRL's family and of ours. They are listed by `shmbuffer.torchrl`."""

HOME_OF = {
    name: module for homes in (LISTED, OTHERS) for module, names in homes.items() for name in names
}
for _name, _one in vars(errors).items():
    if isinstance(_one, type) and issubclass(_one, errors.ShmBufferError):
        HOME_OF[_name] = errors.__name__


def load(name: str) -> Any:
    """Loads a public name; AttributeError if there is no such name."""
    module = HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'shmbuffer' has no attribute {name!r}")
    try:
        home = importlib.import_module(module)
    except AttributeError as error:  # for `from shmbuffer import ...` the name would be missing
        raise ImportError(
            f"{module} cannot be imported: {error}; if sources have changed, compile the core again"
            " (pip install -e .)",
            name=module,
        ) from error
    return getattr(home, name)
