"""The actor that knows the keepers, and makes one on each node that shall have a shard.

    Ray's list of nodes ──▶ ShardMap ──▶ a Keeper on each, pinned to it, under a name
                               ╰──▶ who is where, for clients

All that it holds it is told again when it is started again: its arguments by Ray, the keepers by
their names. A keeper that dies is started by Ray; one whose node died is made again when a node of
that name is back.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from shmbuffer.distributed.runtime import living_nodes, require_ray
from shmbuffer.distributed.shards.keeper import InNode, Keeper

_LOOK_S = 0.5
"""How often it looks for nodes that have come."""

_log = logging.getLogger(__name__)


NAMESPACE = "shmbuffer"
"""Of the actors' names."""


def map_name(name: str) -> str:
    """Of the actor."""
    return f"{name}/map"


def keeper_name(name: str, node_id: str) -> str:
    """Of the actor. One whose node died cannot be moved: a node that is back gets another one."""
    return f"{name}/keeper/{node_id}"


class ShardMap:
    """The actor.

    Args:
        name: of the buffer.
        namespace: of its actors.
        made_of: class, positional and keyword arguments of each shard's buffer, pickled; without
            the directory of its node.
        wanted: names of the nodes that shall have a shard; a number: of the first so many that are
            there; None: all.
        options: of the keepers, as for ``Actor.options()``.
    """

    def __init__(
        self,
        name: str,
        namespace: str,
        made_of: bytes,
        wanted: int | list[str] | None,
        options: dict[str, Any],
    ) -> None:
        self._ray = require_ray()
        self._name, self._namespace, self._options = name, namespace, options
        self._wanted = wanted
        self._parts = self._ray.cloudpickle.loads(made_of)
        self._keepers: dict[str, tuple[str, Any]] = {}  # by name of the node: its id, the actor
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._look()
        threading.Thread(target=self._watch, name="shmbuffer-map", daemon=True).start()

    def keepers(self) -> dict[str, Any]:
        """The keepers, by name of their node."""
        with self._looking:
            return {node: keeper for node, (_, keeper) in self._keepers.items()}

    def parts(self) -> Any:
        """What the buffer of each shard is made of: class, positional and keyword arguments."""
        return self._parts

    def end(self) -> None:
        """Make no more keepers."""
        self._ended.set()
        with self._looking:
            pass

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                self._look()
            except Exception:
                _log.exception("the map of the sharded buffer %r could not look", self._name)

    def _look(self) -> None:
        """Have a keeper on each node that is there and shall have one."""
        with self._looking:
            if self._ended.is_set():
                return
            for node, node_id in self._places().items():
                known = self._keepers.get(node)
                if known is None or known[0] != node_id:
                    self._keepers[node] = node_id, self._keeper(node, node_id)

    def _places(self) -> dict[str, str]:
        """Ids of the nodes that shall have a shard, by their names."""
        found = living_nodes()
        if self._wanted is None:
            return found
        if isinstance(self._wanted, int):
            chosen = [*self._keepers, *sorted(found.keys() - self._keepers.keys())]
            return {node: found[node] for node in chosen[: self._wanted] if node in found}
        return {node: found[node] for node in self._wanted if node in found}

    def _keeper(self, node: str, node_id: str) -> Any:
        """The keeper of a node: the one that is there, or a new one."""
        ray = self._ray
        name = keeper_name(self._name, node_id)
        try:
            return ray.get_actor(name, namespace=self._namespace)
        except ValueError:
            pass  # there is none
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        cls, args, kwargs = self._parts
        here = {**kwargs, "storage": InNode(kwargs["storage"], node)}
        made_of = ray.cloudpickle.dumps((cls, args, here))
        options = {
            "num_cpus": 0,
            "max_restarts": -1,
            **self._options,
            "name": name,
            "namespace": self._namespace,
            "lifetime": "detached",
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }
        return ray.remote(Keeper).options(**options).remote(made_of, node)
