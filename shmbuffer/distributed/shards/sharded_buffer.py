"""A buffer over several nodes, as the process that creates it sees it."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.distributed.keeper import (
    LEAVE_S,
    end_keepers,
    pickle_constructor,
    send_request,
    wait_for_start,
)
from shmbuffer.distributed.runtime import RayUse, living_nodes, require_ray
from shmbuffer.distributed.shards.members import START_S
from shmbuffer.distributed.shards.shard_map import NAMESPACE, ShardMap, map_name
from shmbuffer.distributed.shards.shard_metrics import ShardMetrics
from shmbuffer.distributed.shards.sharded_client import Options, ShardedClient, require_ratio
from shmbuffer.errors import BufferClosedError
from shmbuffer.memory import RateLimiter
from shmbuffer.samplers.rank import require_rank

_NOT_HERE = {
    "generator": "pass rank= to sample differently on each learner, and call torch.manual_seed",
    "pin_memory": "move a sample with data.pin_memory()",
    "sample_unit": "a batch is sampled item by item from the shards; write whole units as items",
}


class ShardedReplayBuffer(ShardedClient):
    """A buffer over the nodes of a Ray cluster, with a ring on each node.

    On each node an actor, the keeper, owns a buffer in a directory on that node. This buffer is a
    *shard*. Writers write to the shard on their own node, in memory. Learners draw from all shards
    by priority, as if they were one buffer. The importance weights are those of a single buffer,
    too.

    **Crashes.** If a keeper or a node has died, its shard is left out of draws and named in the
    log. Ray restarts the keeper, or the map creates a new one when the node returns. The items are
    still in the directory on the node. If Ray's head node dies, the cluster ends. A buffer in a new
    cluster opens the directories again.

    **Limits.** Nothing is replicated: the items of a dead node are missing until the node returns.
    Each shard evicts its own oldest items. A pass or a slice of a sampler never crosses shards.

    Args:
        replay_buffer_cls: class of the buffer of each shard.
        storage: factory of each shard's storage, ``partial(LazyMemmapStorage, capacity,
            scratch_dir=..., shared_init=True)``. Each node uses a subdirectory of ``scratch_dir``
            that is named after the node.
        nodes: names of the nodes that have a shard, or the number of such nodes. The name of a node
            is set by ``ray start --node-name``, and is the node's address by default. A number
            selects the first nodes in the order of their names. None means all nodes, including
            nodes that join later.
        locality: ``"global"`` draws a batch from all shards. ``"local"`` draws the batch from the
            shard of the learner's node, without the network. With a learner on each node and
            ``beta`` 1, the weights make the mean over the learners unbiased, with more variance.
        name: name of the buffer in the cluster, for `find`. If None, chooses a random name.
        prefetch: number of batches that are requested in advance, so that a learner does not wait
            for other nodes.
        rank: rank of this learner among several; see `ReplayBuffer`.
        answer_timeout: seconds after which a shard that does not answer is left out of draws.
        metrics_port: port on which this process serves the metrics of all shards to Prometheus, at
            ``http://127.0.0.1:PORT/metrics``, with the label ``node``. 0 chooses a free port, whose
            number is in the attribute ``metrics_port``. Requires the extra "metrics".
        rate_limiter: `RateLimiter` for the writers and learners of all shards, with a ratio, a
            ``min_size``, or both. A queue is not supported. See the guide on flow control.
        ray_init_config: see `RayReplayBuffer`.
        remote_config: options of the keepers, passed to ``Actor.options()``. None means
            ``{"num_cpus": 0}``.
        **kwargs: arguments of ``replay_buffer_cls``, as for `RayReplayBuffer`.

    Raises:
        ImportError: Ray is not installed.
        TypeError: the storage is not a ``partial`` with a ``scratch_dir``, or an argument cannot
            be pickled.
        ValueError: ``locality`` is unknown, ``rate_limiter`` is a queue, ``name`` is already used,
            or two nodes have the same name.
        NotImplementedError: ``generator`` or ``pin_memory`` was passed.
        TimeoutError: Ray has not started the actors within three minutes. The message names them.

    Cost: a write on a node with a shard takes 1 µs longer than a write to a local buffer. A batch
        costs one message to each shard on another node that contributes to it.

    Example::

        rb = ShardedReplayBuffer(
            replay_buffer_cls=TensorDictPrioritizedReplayBuffer,
            storage=partial(
                LazyMemmapStorage, 1_000_000, scratch_dir="run", shared_init=True
            ),
            alpha=0.7, beta=0.5, batch_size=256, prefetch=4,
        )
        collect.remote(rb.client())
        batch = rb.sample()
    """

    def __init__(
        self,
        *,
        replay_buffer_cls: Callable[..., ReplayBuffer] = ReplayBuffer,
        storage: Any = None,
        nodes: int | list[str] | None = None,
        locality: Literal["global", "local"] = "global",
        name: str | None = None,
        prefetch: int | None = None,
        rank: int | None = None,
        answer_timeout: float = 5.0,
        metrics_port: int | None = None,
        rate_limiter: RateLimiter | None = None,
        ray_init_config: dict[str, Any] | None = None,
        remote_config: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        ray = require_ray()
        _require_storage(storage)
        for argument, instead in _NOT_HERE.items():
            if kwargs.get(argument):
                raise NotImplementedError(f"ShardedReplayBuffer({argument}=...): {instead}")
        require_ratio(rate_limiter)
        options = {"storage": storage, **kwargs}
        parts = pickle_constructor(
            replay_buffer_cls, (), options, public_name="ShardedReplayBuffer"
        )
        name = name or f"buffer-{secrets.token_hex(4)}"
        client_options = _options(name, prefetch, locality, rank, answer_timeout)
        self._ray_use: RayUse | None = RayUse(ray_init_config)
        self._map: Any = None
        self._metrics: ShardMetrics | None = None
        try:
            _require_free(ray, name)
            wanted = _chosen(nodes)
            self._map = (
                ray.remote(ShardMap)
                .options(
                    name=map_name(name),
                    namespace=NAMESPACE,
                    lifetime="detached",
                    max_restarts=-1,
                    num_cpus=0,
                )
                .remote(
                    *(name, parts, wanted, _dead(ray), remote_config or {}),
                    limiter=rate_limiter,
                )
            )
            where = f"the sharded buffer {name!r}"
            ((keepers, _),) = wait_for_start(where, {"map": self._map.keepers.remote()}, START_S)
            ready = {f"keeper of {node}": send_request(one, "") for node, one in keepers.items()}
            wait_for_start(where, ready, START_S)
            wait_for_start(where, {"flow control": self._map.flow.remote("rate")}, START_S)
            super().__init__(client_options)
            if metrics_port is not None:
                base = Path(storage.keywords["scratch_dir"])
                self._metrics = ShardMetrics(self.client, base, metrics_port)
        except BaseException:
            self._end()
            raise

    @staticmethod
    def find(
        name: str,
        *,
        prefetch: int | None = None,
        locality: Literal["global", "local"] = "global",
        rank: int | None = None,
        answer_timeout: float = 5.0,
    ) -> ShardedClient:
        """Finds a buffer in the cluster by its name, and returns a handle on it.

        Args:
            name: name of the buffer.
            prefetch: see the constructor.
            locality: see the constructor.
            rank: see the constructor.
            answer_timeout: see the constructor.

        Raises:
            ValueError: there is no buffer with this name, this process is not connected to a Ray
                cluster, or an argument is invalid.
        """
        return ShardedClient(_options(name, prefetch, locality, rank, answer_timeout))

    def client(self) -> ShardedClient:
        """Returns a handle that can be pickled and cannot end the buffer.

        Raises:
            BufferClosedError: this object was closed.
        """
        if self._map is None:
            raise BufferClosedError(f"{self!r} was closed")
        return ShardedClient(self._options)

    @property
    def metrics_port(self) -> int | None:
        """Port on which this process serves metrics to Prometheus, or None."""
        return None if self._metrics is None else self._metrics.port

    @property
    def is_alive(self) -> bool:
        """True until this object is closed."""
        return self._map is not None

    def close(self) -> None:
        """Ends the actors. Committed items stay in the directories on the nodes. Idempotent."""
        if self._map is not None:
            self.detach()
            self._end()
            del self._members, self._credits

    shutdown = close

    def __getattr__(self, name: str) -> Any:
        if name in ("_members", "_credits"):  # deleted by `close`
            raise BufferClosedError(f"{self!r} was closed")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _end(self) -> None:
        """Ends the metrics server, the map and the keepers, and releases Ray."""
        ray = require_ray()
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            metrics.close()
        shard_map, self._map = self._map, None
        ray_use, self._ray_use = self._ray_use, None
        try:
            if shard_map is not None and ray.is_initialized():
                keepers = {member.node: member.keeper for member in vars(self).get("_members", ())}
                with suppress(ray.exceptions.RayError):  # the actor may be restarting
                    keepers |= ray.get(shard_map.end.remote(), timeout=LEAVE_S)
                ray.kill(shard_map, no_restart=True)
                end_keepers(keepers.values())
        finally:
            if ray_use is not None:
                ray_use.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _options(
    name: str, prefetch: int | None, locality: str, rank: int | None, answer_timeout: float
) -> Options:
    """Returns the settings of a handle. Raises ValueError if one of them is invalid."""
    if locality not in ("global", "local"):
        raise ValueError(f"locality must be 'global' or 'local', got {locality!r}")
    if not 0 < answer_timeout < math.inf:
        raise ValueError(
            f"answer_timeout must be a positive number of seconds, got {answer_timeout!r}"
        )
    return Options(name, prefetch or 0, locality, require_rank(rank), answer_timeout)


def _require_free(ray: Any, name: str) -> None:
    """Raises ValueError if the cluster has a sharded buffer called ``name``."""
    try:
        ray.get_actor(map_name(name), namespace=NAMESPACE)
    except ValueError:
        return
    raise ValueError(
        f"the sharded buffer {name!r} already exists; get a handle with "
        f"ShardedReplayBuffer.find({name!r}), or call close() in the process that created it"
    )


def _chosen(nodes: int | list[str] | None) -> list[str] | None:
    """Returns the names of the nodes that should have a shard, or None for all nodes.

    A number is replaced by names here, so that the choice stays the same if the map restarts.
    """
    there = sorted(living_nodes())
    if nodes is None:
        return nodes
    is_number = isinstance(nodes, int) and not isinstance(nodes, bool)
    is_list = isinstance(nodes, list | tuple) and all(isinstance(one, str) for one in nodes)
    if not is_number and not is_list:
        raise TypeError(
            "ShardedReplayBuffer(nodes=...) must be a number or a list of node names, got "
            f"{nodes!r}"
        )
    if isinstance(nodes, int) and not 1 <= nodes <= len(there):
        raise ValueError(
            f"ShardedReplayBuffer(nodes={nodes}) must be between 1 and {len(there)}, the number of "
            f"nodes in the Ray cluster ({', '.join(there)}); pass a list of names to include nodes "
            "that join later"
        )
    chosen = there[:nodes] if isinstance(nodes, int) else list(nodes)
    if not set(chosen) & set(there):
        raise ValueError(
            f"ShardedReplayBuffer(nodes={nodes!r}): at least one of these nodes must be present; "
            f"the Ray cluster has {', '.join(there)}"
        )
    return chosen


def _dead(ray: Any) -> set[str]:
    """Returns Ray's ids of the nodes that have died."""
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}


def _require_storage(storage: Any) -> None:
    """Raises TypeError unless the storage is a ``partial`` with a ``scratch_dir``."""
    keywords = getattr(storage, "keywords", None)
    if not isinstance(keywords, dict) or not keywords.get("scratch_dir"):
        raise TypeError(
            "ShardedReplayBuffer(storage=...) must be a function that is called once on each node, "
            f"got {storage!r}; pass partial(LazyMemmapStorage, capacity, scratch_dir=..., "
            "shared_init=True)"
        )
