"""The parts of a buffer (storage, sampler, writer, transforms), and the plan made from them.

    ReplayBuffer ─┬─ Writes ──────────┐
                  ├─ Reads ───────────┤
                  ├─ StoredItems ─────┼──▶ Parts ──▶ storage, sampler, writer, transforms, Plan
                  ├─ PriorityUpdates ─┤
                  └─ Saving ──────────┘

The objects that implement the calls of a buffer have a reference to its `Parts`, but never to the
buffer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shmbuffer.buffers.data_path.description import describe
from shmbuffer.buffers.data_path.plan import Plan
from shmbuffer.buffers.data_path.prefetch import Draws, Prefetcher
from shmbuffer.errors import ShmBufferError
from shmbuffer.items.keys import OWN_KEYS, WEIGHT_KEYS
from shmbuffer.memory import Engine, RateLimiter
from shmbuffer.memory.format.leaf import Key
from shmbuffer.memory.system.fork_lock import ForkLock
from shmbuffer.samplers.priority.prioritized import PrioritizedSampler
from shmbuffer.samplers.random import RandomSampler
from shmbuffer.samplers.rank import UNKNOWN
from shmbuffer.samplers.sampler import Sampler, between_forks
from shmbuffer.samplers.taking import Consumes
from shmbuffer.storages.list import ListStorage
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.storages.storage import Storage
from shmbuffer.storages.tensor import TensorStorage
from shmbuffer.torchrl.transforms import Compose, compose
from shmbuffer.units.unit import SampleUnit
from shmbuffer.writers.writer import Writer

DEFAULT_CAPACITY = 1000  # capacity of the default ListStorage, as in TorchRL

_MADE = ("storage", "sampler", "writer", "transform", "plan")


def ring_backed(storage: Storage, what: str) -> RingBacked:
    """Returns the storage if it belongs to this package.

    Args:
        storage: the storage of a buffer.
        what: beginning of the error message, such as ``"min_size and timeout need"``.

    Raises:
        TypeError: the storage does not belong to this package.
    """
    if isinstance(storage, RingBacked):
        return storage
    raise TypeError(
        f"{what} a storage of this package, got a {type(storage).__name__}; create the buffer with "
        "a LazyTensorStorage or another storage of this package"
    )


def shareable(storage: Storage, what: str) -> Engine:
    """Returns the engine of a storage, which implements flow control.

    Args:
        storage: the storage of a buffer.
        what: beginning of the error message; see `ring_backed`.

    Raises:
        TypeError: the storage does not belong to this package.
        RuntimeError: the items are Python objects, which cannot be shared.
    """
    backed = ring_backed(storage, what)
    try:
        return backed.engine()
    except RuntimeError as error:
        if isinstance(error, ShmBufferError):
            raise
        raise RuntimeError(f"this buffer has no flow control: {error}") from error


def made(part: Any) -> Any:
    """Returns a storage, sampler or writer, or the result of its factory.

    Raises TypeError for any other argument.
    """
    if isinstance(part, (Storage, Sampler, Writer)):
        return part
    if not callable(part):
        raise TypeError(
            "storage, sampler and writer must be objects of these classes or functions without "
            f"arguments that create them, got {part!r}"
        )
    return part()


def _in_child(parts: Parts, abandoned: bool) -> None:
    """Discards the parts in a forked child if a thread of the parent was creating them."""
    if abandoned and parts.makers is not None:
        parts.unmake()


@dataclass(eq=False)
class Parts:
    """Storage, sampler, writer, transforms and options of a buffer, and the plan made from them.

    The first four are called the parts of the buffer.
    """

    family: str  # name under which a directory records the buffer's class
    mapping: str  # type for plain dicts in the data: ``"dict"`` or ``"tensordict"``
    makers: dict[str, Any] | None  # the parts or their factories; None once the parts exist
    unit: SampleUnit | None
    collate_fn: Callable[[Any], Any] | None
    pin_memory: bool
    batch_size: int | None
    dim_given: int | None  # the constructor's argument ``dim_extend``
    generator: torch.Generator | None
    rank_given: int | None  # the constructor's argument ``rank``
    treated_as_shared: bool
    weight_key: str | None
    priority_key: Key | None = None  # key of the entry with priorities, or None
    goals: Any = None  # relabels goals in samples; see `hindsight.Goals`
    # Parts of the members of an ensemble, which are saved together with the ensemble.
    members: Sequence[Parts] = ()
    prefetcher: Prefetcher | None = None
    is_closed: bool = False
    storage: Storage = field(init=False)
    sampler: Sampler = field(init=False)
    writer: Writer = field(init=False)
    transform: Compose = field(init=False)
    plan: Plan = field(init=False)
    _making = ForkLock(_in_child)  # held while a thread creates the parts

    def make(self) -> None:
        """Creates the parts from their factories, and makes the plan.

        Raises ValueError or TypeError if the arguments of the constructor do not fit together.
        """
        makers = self.makers
        assert makers is not None
        storage, sampler = makers["storage"], makers["sampler"]
        self.storage = ListStorage(DEFAULT_CAPACITY) if storage is None else made(storage)
        self.sampler = RandomSampler() if sampler is None else made(sampler)
        self.writer = made(makers["writer"])
        transform = makers["transform"]
        self.transform = compose(transform() if makers["is_factory"] else transform)
        if makers["checkpointer"] is not None:
            self.storage.checkpointer = makers["checkpointer"]
        if self.batch_size is None and getattr(self.sampler, "drop_last", False):
            raise ValueError(
                "Samplers with drop_last=True must work with a predictable batch-size: pass "
                "batch_size to the constructor of the buffer, or drop_last=False to the "
                f"{type(self.sampler).__name__}"
            )
        if self.dim_extend < 0 or (self.dim_given and 1 < self.storage.ndim <= self.dim_given):
            raise ValueError(
                f"dim_extend must be from 0 to ndim - 1 = {self.storage.ndim - 1}, got "
                f"{self.dim_given}"
            )
        self.join()
        limiter = makers["rate_limiter"]
        same = isinstance(limiter, RateLimiter) and limiter.has_same_limits(self.rate_limiter)
        if limiter is not None and not same:
            self.set_rate_limiter(limiter)  # starts the ratio at zero, so it is skipped if equal
        self.makers = None

    def unmake(self) -> None:
        """Discards all parts, because some of them could not be created."""
        for name in vars(self).keys() & _MADE:
            delattr(self, name)

    def __getstate__(self) -> dict[str, Any]:
        self.drop_prefetched()
        own = ("plan", "_making")
        state = {name: value for name, value in vars(self).items() if name not in own}
        return {**state, "prefetcher": None if self.prefetcher is None else self.prefetcher.depth}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.prefetch(state["prefetcher"])
        if self.makers is None:
            self.join()

    # -- replacement ---------------------------------------------------------------------------

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None) -> Storage:
        """Replaces the storage and the ``collate_fn``, and returns the old storage."""
        self.drop_prefetched()
        before = self.storage
        if isinstance(self.sampler, PrioritizedSampler):
            self.sampler.release(before)
        before.detach(self)
        self.storage, self.collate_fn = storage, collate_fn
        self.join()
        return before

    def replace(self, name: str, part: Any) -> Any:
        """Replaces the sampler or the writer, and returns the old object.

        If the new object raises an exception because it is incompatible, the old one is kept.

        Args:
            name: ``"sampler"`` or ``"writer"``.
            part: the new sampler or writer.
        """
        self.drop_prefetched()
        before = getattr(self, name)
        if isinstance(before, PrioritizedSampler):
            before.release(self.storage)
        setattr(self, name, part)
        try:
            self.join()
        except BaseException:
            setattr(self, name, before)
            self.join()
            raise
        return before

    def set_generator(self, generator: torch.Generator | None) -> None:
        """Sets the random generator of the buffer, and of the members of an ensemble."""
        self.generator = generator
        for part in (self.storage, self.sampler, self.writer):
            part._rng = generator  # samplers and storages from other packages read TorchRL's name
        if generator is not None:
            for member in self.members:
                member.set_generator(generator)
        self.ask_rank()

    def seed_with(self, state: torch.Tensor, device: torch.device) -> None:
        """Sets the state of the generator.

        If there is no generator, or if it belongs to another device, a new generator is created.

        Args:
            state: state of a generator.
            device: device of that generator.
        """
        if self.generator is None or self.generator.device.type != device.type:
            self.set_generator(torch.Generator(device))
        assert self.generator is not None
        between_forks(self.generator.set_state, state)

    def share(self, shared: bool) -> None:
        """Sets whether the buffer is treated as shared; see `ReplayBuffer.shared`."""
        self.treated_as_shared = shared
        if self.makers is None:
            self.ask_rank()
            self.make_plan()

    def set_dim_extend(self, dim: int) -> None:
        """Sets the dimension of the data along which writes append.

        Raises RuntimeError if the dimension was already set to another value.
        """
        if self.dim_given is not None and dim != self.dim_given:
            raise RuntimeError(
                f"dim_extend was set to {self.dim_given} and cannot be changed to {dim}; create a "
                f"new buffer with dim_extend={dim}"
            )
        self.dim_given = dim
        if self.makers is None:
            self.make_plan()

    def set_rate_limiter(self, limiter: RateLimiter | None) -> None:
        """Sets the rate limiter of the buffer. If None, removes the limiter."""
        if not (limiter is None or isinstance(limiter, RateLimiter)):
            raise TypeError(f"rate_limiter must be a RateLimiter or None, got {limiter!r}")
        shareable(self.storage, "a rate_limiter needs").set_limiter(limiter)

    def mark_update(self, index: Any) -> None:
        """Sets the priorities of the items at ``index`` to the default.

        Storages from other packages also call this method, under TorchRL's name.
        """
        self.sampler.mark_update(index, storage=self.storage)

    # -- combined properties -------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """True if reads are validated and samples have ``index_generation``."""
        return self.treated_as_shared or self.storage.shared

    @property
    def dim_extend(self) -> int:
        """Dimension of the data along which ``extend`` appends."""
        return self.storage.ndim - 1 if self.dim_given is None else self.dim_given

    @property
    def weight_keys(self) -> tuple[str, ...]:
        """Keys of the importance weights in a sample."""
        return WEIGHT_KEYS if self.weight_key is None else (self.weight_key,)

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """The rate limiter of the storage, or None."""
        engine = getattr(self.storage, "open_engine", None)
        return None if engine is None else engine.limiter

    def collate(self, data: Any) -> Any:
        """Collates items from the storage into a batch, with the user's ``collate_fn`` if any."""
        if self.collate_fn is None:
            return self.storage.collate(data)
        return self.collate_fn(self.storage.uncollated(data))

    def join(self) -> None:
        """Connects storage, sampler and writer with each other, and makes the plan."""
        storage = self.storage
        self.set_generator(self.generator)
        self.writer.register_storage(storage)
        if isinstance(storage, TensorStorage):
            if self.mapping == "tensordict":
                extra = (self.priority_key, self.weight_key)
                storage.allow(OWN_KEYS.union(key for key in extra if isinstance(key, str)))
            storage.mapping = self.mapping
        elif not isinstance(storage, RingBacked):
            storage.attach(self)  # calls `mark_update` after writes; a ring sets priorities itself
        self.make_plan()

    def make_plan(self) -> Plan:
        """Makes the plan for the current parts."""
        describe(self)
        if isinstance(self.sampler, PrioritizedSampler | Consumes):
            self.sampler.bind(self.storage)
        self.plan = Plan(self)
        self.measure_hand_over()
        return self.plan

    def planned(self) -> Plan:
        """Returns the plan. If the storage has a new ring or new rows, makes a new plan first."""
        plan = self.plan
        backed = plan.ring_backed
        if backed is None or plan.payload is (backed._mover or backed.mover()):
            return plan
        return self.make_plan()

    # -- draws, and the batches that were drawn in advance -------------------------------------

    def ask_rank(self) -> None:
        """Tells the sampler to determine its rank at the next draw."""
        self.sampler._rank_in_draws = UNKNOWN
        self.sampler._rank_given = self.rank_given, self.treated_as_shared

    def draws(self) -> Draws:
        """Returns the current positions of the sampler and the generator."""
        generator = self.generator
        state = None if generator is None else between_forks(generator.get_state)
        return Draws(self.sampler._position(), generator, state)

    def go_to(self, draws: Draws) -> None:
        """Rewinds the sampler and the generator to the positions in ``draws``."""
        with self.plan.choosing():
            self.sampler._rewind(draws.position)
            if draws.generator is not None and draws.state is not None:
                between_forks(draws.generator.set_state, draws.state)

    def prefetch(self, depth: int | None) -> None:
        """Sets the number of batches to prefetch. None or 0 means no prefetching."""
        self.prefetcher = Prefetcher(depth, self.draws, self.go_to) if depth else None

    def drop_prefetched(self) -> None:
        """Discards the prefetched batches as if they had never been drawn."""
        if self.prefetcher is not None:
            self.prefetcher.drop()

    def measure_hand_over(self) -> None:
        """Measures again whether threads should prefetch, because the buffer has changed."""
        if self.prefetcher is not None:
            self.prefetcher.hand_over.restart()


class UnmadeParts(Parts):
    """Parts that are created on first access. Other threads wait until they exist."""

    # This is a separate class, because ``__getattr__`` slows down all attributes of a class.

    _is_making = False

    def __getattr__(self, name: str) -> Any:
        if name in _MADE:
            with self._making:
                if self.makers is not None and not self._is_making:
                    self._make_once()
            if name in vars(self):
                return vars(self)[name]
            raise AttributeError(
                f"the factory of a storage, sampler, writer or transform used {name!r} of its "
                "buffer, which does not exist yet; create the object without the buffer"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _make_once(self) -> None:
        self._is_making = True
        try:
            self.make()
        except BaseException:
            self.unmake()
            raise
        self._is_making = False
        self.__class__ = Parts  # type: ignore[assignment] # access without __getattr__ is faster

    def unmake(self) -> None:
        """Discards all parts after a failed attempt to create them."""
        super().unmake()
        self._is_making = False
