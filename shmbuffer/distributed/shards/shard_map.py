"""The actor that knows the keepers, and makes one on each node that shall have a shard.

    Ray's list of nodes ──▶ ShardMap ──▶ a Keeper on each, pinned to it, under a name
                               ╰──▶ who is where, for clients

All that it holds it is told again when it is started again: its arguments and the nodes, also those
that have died, by Ray; the keepers by their names. A keeper that dies is started by Ray; one whose
node died is made again when a node of that name is back.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Literal

from shmbuffer.distributed.runtime import living_nodes, require_ray
from shmbuffer.distributed.shards.flow_control import FlowControl
from shmbuffer.distributed.shards.keeper import InNode, Keeper
from shmbuffer.memory import RateLimiter

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
        wanted: names of the nodes that shall have a shard; None: all.
        former: ids of nodes that had died before there was this buffer.
        options: of the keepers, as for ``Actor.options()``.
        limiter: what keeps writers and learners of all shards in step.
    """

    def __init__(
        self,
        name: str,
        namespace: str,
        made_of: bytes,
        wanted: list[str] | None,
        former: set[str],
        options: dict[str, Any],
        limiter: RateLimiter | None,
    ) -> None:
        self._ray = require_ray()
        self._name, self._namespace, self._options = name, namespace, options
        self._wanted, self._former = wanted, former
        self._absent: list[str] = []  # names of nodes whose keeper it has not seen
        self._failure: Exception | None = None
        self._parts = self._ray.cloudpickle.loads(made_of)
        self._keepers: dict[str, tuple[str, Any]] = {}  # by name of the node: its id, the actor
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._look()
        threading.Thread(target=self._watch, name="shmbuffer-map", daemon=True).start()
        where = f"sharded buffer {name!r}"
        self._flow = FlowControl(self._ray, self._there, limiter, where)

    def keepers(self) -> tuple[dict[str, Any], list[str]]:
        """The keepers, by name of their node; nodes whose keeper this map has not seen.

        Raises:
            Exception: what keeps it from having any.
        """
        with self._looking:
            if self._failure is not None and not self._keepers:
                raise self._failure
            return self._all(), self._absent

    def _there(self) -> dict[str, Any]:
        with self._looking:
            return self._all()

    def _all(self) -> dict[str, Any]:
        return {node: keeper for node, (_, keeper) in self._keepers.items()}

    def parts(self) -> Any:
        """What the buffer of each shard is made of: class, positional and keyword arguments."""
        return self._parts

    def rate(self) -> RateLimiter | None:
        """What keeps writers and learners in step."""
        return self._flow.rate()

    def set_rate(self, limiter: RateLimiter | None) -> None:
        """See `FlowControl.set_rate`."""
        self._flow.set_rate(limiter)

    def lend(self, *asked: Any) -> Any:
        """See `FlowControl.lend`."""
        return self._flow.lend(*asked)

    def gate(self, what: Literal["hold", "renew", "release"], token: str) -> Any:
        """See those methods of `FlowControl`."""
        return getattr(self._flow, what)(token)

    def end(self) -> dict[str, Any]:
        """Make no more keepers; return those there are."""
        self._ended.set()
        self._flow.end()
        with self._looking:
            return self._all()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        """Have a keeper on each node that is there and shall have one."""
        with self._looking:
            if self._ended.is_set():
                return
            before, self._failure = self._failure, None
            try:
                for node, node_id in self._places().items():
                    self._keepers[node] = node_id, self._keeper(node, node_id)
                self._absent = sorted(self._all_nodes() - self._keepers.keys())
            except Exception as error:  # it looks again; one that raises in the beginning is dead
                self._failure = error
                if str(error) != str(before):
                    _log.exception("the map of the sharded buffer %r could not look", self._name)

    def _all_nodes(self) -> set[str]:
        """Names of the nodes that shall have a shard, also of those that have died."""
        if self._wanted is not None:
            return set(self._wanted)
        nodes = self._ray.nodes()
        return {node["NodeName"] for node in nodes if node["NodeID"] not in self._former}

    def _places(self) -> dict[str, str]:
        """Ids of the nodes that shall have a shard, by their names."""
        found = living_nodes()
        if self._wanted is None:
            return found
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
