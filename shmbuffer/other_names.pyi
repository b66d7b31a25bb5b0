"""All other public names except the errors. `shmbuffer.names` reads this list."""

from shmbuffer.buffers.calls.stored_items import ConditionalUpdateResult as ConditionalUpdateResult
from shmbuffer.buffers.flow.reservation import Reservation as Reservation
from shmbuffer.buffers.hindsight import HindsightStrategy as HindsightStrategy
from shmbuffer.buffers.schedulers import LambdaScheduler as LambdaScheduler
from shmbuffer.buffers.schedulers import ParameterScheduler as ParameterScheduler
from shmbuffer.buffers.schedulers import SchedulerList as SchedulerList
from shmbuffer.buffers.schedulers import StepScheduler as StepScheduler
from shmbuffer.ensembles.joint_parts import StorageEnsemble as StorageEnsemble
from shmbuffer.ensembles.joint_parts import (
    StorageEnsembleCheckpointer as StorageEnsembleCheckpointer,
)
from shmbuffer.ensembles.joint_parts import WriterEnsemble as WriterEnsemble
from shmbuffer.ensembles.sampler_ensemble import SamplerEnsemble as SamplerEnsemble
from shmbuffer.memory.clients.partials import Partial as Partial
from shmbuffer.memory.flow.consumer_status import ConsumerStatus as ConsumerStatus
from shmbuffer.memory.flow.consumer_status import HeldItems as HeldItems
from shmbuffer.memory.format.ledger import Acknowledged as Acknowledged
from shmbuffer.memory.system.progress import ProgressReport as ProgressReport
from shmbuffer.memory.system.threads import set_threads as set_threads
from shmbuffer.samplers.labelled.groups import GroupCounts as GroupCounts
from shmbuffer.samplers.priority.segment_trees import MinSegmentTreeFp32 as MinSegmentTreeFp32
from shmbuffer.samplers.priority.segment_trees import MinSegmentTreeFp64 as MinSegmentTreeFp64
from shmbuffer.samplers.priority.segment_trees import SumSegmentTreeFp32 as SumSegmentTreeFp32
from shmbuffer.samplers.priority.segment_trees import SumSegmentTreeFp64 as SumSegmentTreeFp64
from shmbuffer.samplers.sampler import Sampler as Sampler
from shmbuffer.saves.checkpointers.checkpointer import (
    StorageCheckpointerBase as StorageCheckpointerBase,
)
from shmbuffer.saves.checkpointers.episode_checkpointers import (
    FlatStorageCheckpointer as FlatStorageCheckpointer,
)
from shmbuffer.saves.checkpointers.episode_checkpointers import (
    H5StorageCheckpointer as H5StorageCheckpointer,
)
from shmbuffer.saves.checkpointers.episode_checkpointers import (
    NestedStorageCheckpointer as NestedStorageCheckpointer,
)
from shmbuffer.saves.checkpointers.list_checkpointer import (
    CompressedListStorageCheckpointer as CompressedListStorageCheckpointer,
)
from shmbuffer.saves.checkpointers.list_checkpointer import (
    ListStorageCheckpointer as ListStorageCheckpointer,
)
from shmbuffer.saves.checkpointers.tensor_checkpointer import (
    TensorStorageCheckpointer as TensorStorageCheckpointer,
)
from shmbuffer.storages.storage import Storage as Storage
from shmbuffer.storages.tensor import TensorStorage as TensorStorage
from shmbuffer.tensors.records.ragged import densify as densify
from shmbuffer.tensors.records.ragged import pad as pad
from shmbuffer.torchrl.functions import DEFAULT_DONE_KEYS as DEFAULT_DONE_KEYS
from shmbuffer.torchrl.functions import find_start_stop_traj as find_start_stop_traj
from shmbuffer.torchrl.functions import pin_memory_output as pin_memory_output
from shmbuffer.torchrl.functions import tree_iter as tree_iter
from shmbuffer.torchrl.functions import unravel_index as unravel_index
from shmbuffer.torchrl.ted.flat import TED2Flat as TED2Flat
from shmbuffer.torchrl.ted.hdf5 import H5Combine as H5Combine
from shmbuffer.torchrl.ted.hdf5 import H5Split as H5Split
from shmbuffer.torchrl.ted.items import Flat2TED as Flat2TED
from shmbuffer.torchrl.ted.nested import Nested2TED as Nested2TED
from shmbuffer.torchrl.ted.nested import TED2Nested as TED2Nested
from shmbuffer.torchrl.transforms import Compose as Compose
from shmbuffer.units.unit import SampleUnit as SampleUnit
from shmbuffer.units.unit import Transition as Transition
from shmbuffer.watch.loggers import log_stats as log_stats
from shmbuffer.writers.round_robin import RoundRobinWriter as RoundRobinWriter
from shmbuffer.writers.round_robin import TensorDictRoundRobinWriter as TensorDictRoundRobinWriter
from shmbuffer.writers.writer import Writer as Writer
