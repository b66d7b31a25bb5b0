"""Real processes in a torch RPC group that run functions for a test."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import rpc

NAMES = ("buffer", "learner")
PATIENCE_S = 50.0
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch", "tensordict"])


class Group:
    """Two processes, ``"buffer"`` and ``"learner"``; the test sends calls to the learner.

    Args:
        folder: the folder for their rendezvous.
    """

    def __init__(self, folder: Path) -> None:
        self.learner, theirs = _processes.Pipe()
        ends = [None, theirs]
        self.processes = [
            _processes.Process(target=_live, args=(rank, f"file://{folder}/meet", ends[rank]))
            for rank in (0, 1)
        ]
        for process in self.processes:
            process.start()
        theirs.close()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of a module in the learner; returns or raises its result."""
        self.learner.send((function, args))
        if not self.learner.poll(PATIENCE_S):
            raise TimeoutError(f"{function.__name__} did not answer in {PATIENCE_S} s")
        done, result = self.learner.recv()
        if not done:
            raise result
        return result

    def end(self) -> None:
        """Lets both processes leave the group and end."""
        self.learner.send(None)
        for process in self.processes:
            process.join(PATIENCE_S)
        codes = [process.exitcode for process in self.processes]
        self.kill()
        assert codes == [0, 0], f"exit codes {codes}"

    def kill(self) -> None:
        """Kills both processes, whatever they were doing."""
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        self.learner.close()


def _live(rank: int, meet: str, orders: Connection | None) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=meet, num_worker_threads=4, rpc_timeout=PATIENCE_S
    )
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=2, rpc_backend_options=options)
    while orders is not None and (order := orders.recv()) is not None:
        function, args = order
        try:
            answer = (True, function(*args))
        except Exception as error:
            answer = (False, error)
        orders.send(answer)
        del answer, order, function, args  # they may hold RRefs, for which shutdown would wait
    rpc.shutdown()
