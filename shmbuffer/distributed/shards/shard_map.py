"""The actor that lists the keepers, and creates a keeper on each node that should have a shard.

    Ray's list of nodes ──▶ ShardMap ──▶ a named Keeper on each node, pinned to the node
                               ╰──▶ the keepers by node, for clients

After a restart, the map recovers all its state. Ray stores the map's arguments and lists all nodes,
including dead nodes. The map finds the keepers by their actor names. Ray restarts a keeper that
dies. If a node dies, the map creates a new keeper when a node with the same name joins the cluster.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path
from typing import Any

from shmbuffer.distributed.keeper import Keeper
from shmbuffer.distributed.runtime import living_nodes, require_ray
from shmbuffer.distributed.shards.flow.flow_control import FlowControl
from shmbuffer.distributed.shards.shard import Shard
from shmbuffer.memory import RateLimiter

_POLL_S = 0.5
"""Seconds between two searches for new nodes."""

_log = logging.getLogger(__name__)


NAMESPACE = "shmbuffer"
"""Ray namespace that contains the names of the maps and keepers."""


def map_name(name: str) -> str:
    """Returns the actor name of the map of the buffer ``name``."""
    return f"{name}/map"


def find_map(name: str) -> Any:
    """Returns the map of the buffer ``name``.

    Raises ValueError if there is no map, or if this process is not connected to a cluster.
    """
    ray = require_ray()
    if not ray.is_initialized():  # ray.get_actor() would start a new cluster
        raise ValueError(
            f"the sharded buffer {name!r} cannot be reached, because this process is not connected "
            "to a Ray cluster; call ray.init(address='auto') first"
        )
    try:
        return ray.get_actor(map_name(name), namespace=NAMESPACE)
    except ValueError:
        raise ValueError(
            f"there is no sharded buffer {name!r} in this Ray cluster; create it with "
            "ShardedReplayBuffer(name=...), and do not close it while it is used"
        ) from None


def keeper_name(name: str, node_id: str) -> str:
    """Returns the actor name of the keeper on a node.

    Args:
        name: name of the buffer.
        node_id: Ray's id of the node. A node that returns after its death has a new id.
    """
    return f"{name}/keeper/{node_id}"


class ShardMap:
    """Ray actor that creates and lists the keepers of a sharded buffer."""

    def __init__(
        self,
        name: str,
        constructor: bytes,  # pickled class and arguments of each shard's buffer
        wanted: list[str] | None,  # names of the nodes that should have a shard; None means all
        former: set[str],  # ids of the nodes that died before the buffer was created
        options: dict[str, Any],  # Ray options of the keepers
        limiter: RateLimiter | None,
    ) -> None:
        self._ray = require_ray()
        self._name, self._options = name, options
        self._wanted, self._former = wanted, former
        self._absent: list[str] = []  # names of nodes without a keeper
        self._failure: Exception | None = None
        self._parts = self._ray.cloudpickle.loads(constructor)
        self._keepers: dict[str, tuple[str, Any]] = {}  # node name -> (node id, actor)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._create_missing()
        threading.Thread(target=self._watch, name="shmbuffer-map", daemon=True).start()
        where = f"sharded buffer {name!r}"
        self._flow = FlowControl(self._ray, self._list_keepers, limiter, where)

    def keepers(self) -> tuple[dict[str, Any], list[str]]:
        """Returns the keepers keyed by node name, and the names of the nodes without a keeper.

        If no keeper could be created, raises the error of the last attempt.
        """
        with self._lock:
            if self._failure is not None and not self._keepers:
                raise self._failure
            return self._keepers_by_node(), self._absent

    def _list_keepers(self) -> dict[str, Any]:
        """Returns the keepers, keyed by node name."""
        with self._lock:
            return self._keepers_by_node()

    def _keepers_by_node(self) -> dict[str, Any]:
        """Returns the keepers, keyed by node name. The caller holds the lock."""
        return {node: keeper for node, (_, keeper) in self._keepers.items()}

    def parts(self) -> Any:
        """Returns the class, positional arguments and keyword arguments of each shard's buffer."""
        return self._parts

    def flow(self, name: str, *args: Any) -> Any:
        """Calls the method ``name`` of `FlowControl`, and returns its result."""
        return getattr(self._flow, name)(*args)

    def end(self) -> dict[str, Any]:
        """Stops creating keepers, and returns the existing keepers, keyed by node name."""
        self._ended.set()
        self._flow.end()
        with self._lock:
            return self._keepers_by_node()

    def _watch(self) -> None:
        """Creates missing keepers regularly until `end` is called."""
        while not self._ended.wait(_POLL_S):
            self._create_missing()

    def _create_missing(self) -> None:
        """Lists the nodes, and creates a keeper on each node that should have one."""
        with self._lock:
            if self._ended.is_set():
                return
            before, self._failure = self._failure, None
            try:
                for node, node_id in self._living_wanted().items():
                    self._keepers[node] = node_id, self._keeper(node, node_id)
                self._absent = sorted(self._all_nodes() - self._keepers.keys())
            except Exception as error:  # the next pass retries; raising would end the actor
                self._failure = error
                if str(error) != str(before):
                    _log.exception(
                        "the map of the sharded buffer %r could not check its nodes", self._name
                    )

    def _all_nodes(self) -> set[str]:
        """Returns the names of all nodes that should have a shard, including dead nodes."""
        if self._wanted is not None:
            return set(self._wanted)
        nodes = self._ray.nodes()
        return {node["NodeName"] for node in nodes if node["NodeID"] not in self._former}

    def _living_wanted(self) -> dict[str, str]:
        """Returns a mapping from name to Ray id of the living nodes that should have a shard."""
        found = living_nodes()
        if self._wanted is None:
            return found
        return {node: found[node] for node in self._wanted if node in found}

    def _keeper(self, node: str, node_id: str) -> Any:
        """Returns the keeper on a node, and creates the keeper if it does not exist."""
        ray = self._ray
        name = keeper_name(self._name, node_id)
        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            pass  # no keeper has this name yet
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        cls, args, kwargs = self._parts
        storage = kwargs["storage"]
        own = partial(storage, scratch_dir=Path(storage.keywords["scratch_dir"]) / node)
        constructor = ray.cloudpickle.dumps((cls, args, {**kwargs, "storage": own}))
        options = {
            "num_cpus": 0,
            "max_restarts": -1,
            **self._options,
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }
        return ray.remote(Keeper).options(**options).remote(constructor, Shard, node)
