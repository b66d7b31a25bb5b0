"""Which tests run one after the other in one process, where several processes run all of them.

These share what is dear to start. pytest-xdist has marks for that, but takes them to the scheduler
in an attribute that pytest does not read from 9.2 on: without a word, each process starts
everything. The scheduler that decides by names alone is part of its documented interface.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

#: Groups of files. A file that is in none shares nothing that is dear: its tests run anywhere.
GROUPS = (
    # A program is compiled for each.
    ("tests/test_wheel.py",),
    tuple(f"tests/native/test_{name}.py" for name in ("corners", "relink", "stress", "teeth")),
    ("tests/mutants/test_mutants.py",),
    # A process that has loaded torch serves each.
    ("tests/docs/test_code_blocks.py",),
    ("tests/faults/test_checkpoints.py",),
    # What each call does where nothing is in its way is found once.
    ("tests/hostile/test_public_paths.py",),
    # A cluster, a group, a run of everything.
    ("tests/distributed/test_ray.py",),
    tuple(
        f"tests/distributed/test_{name}.py"
        for name in ("sharded", "sharded_deaths", "sharded_flow", "conformance_shards", "examples")
    ),
    ("tests/distributed/test_rpc.py",),
    ("tests/replay/test_resume.py",),
    ("tests/test_benchmarks.py",),
    # A buffer that others use.
    ("tests/cli/test_plot.py",),
    ("tests/test_monitoring.py",),
    ("tests/torture/test_rules.py",),
)
_FIRST = {file: group[0] for group in GROUPS for file in group}


class GroupScheduling(LoadScopeScheduling):
    """Groups first, those of most tests before the others; then test by test."""

    def _split_scope(self, nodeid: str) -> str:
        return _FIRST.get(nodeid.partition("::")[0], nodeid)

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        """Forget what is done: its base goes through all that it has given out after each test."""
        super().mark_test_complete(node, item_index, duration)
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(self.assigned_work[node][scope].values()):
            del self.assigned_work[node][scope]
