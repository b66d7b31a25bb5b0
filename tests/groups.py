"""Groups of tests that run in one process when several processes run the test suite.

The tests of a group share something that is expensive to start. pytest-xdist has marks for groups,
but passes them to the scheduler in an attribute that pytest does not read since 9.2. Each process
would then start everything without a warning. The scheduler that decides by names alone is part of
its documented interface.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

#: Groups of files. The tests of all other files share nothing expensive and run anywhere.
GROUPS = (
    # A compiled program.
    ("tests/test_wheel.py",),
    tuple(f"tests/native/test_{name}.py" for name in ("corners", "relink", "stress", "teeth")),
    ("tests/mutants/test_mutants.py",),
    # A server process that has loaded torch.
    ("tests/docs/test_code_blocks.py",),
    ("tests/faults/test_checkpoints.py",),
    # The calls on the usual path, which are recorded once.
    ("tests/hostile/test_public_paths.py",),
    # A cluster, a process group, or a run of everything.
    ("tests/distributed/test_ray.py",),
    tuple(
        f"tests/distributed/test_{name}.py"
        for name in ("sharded", "sharded_deaths", "sharded_flow", "conformance_shards", "examples")
    ),
    ("tests/distributed/test_rpc.py",),
    ("tests/replay/test_resume.py",),
    ("tests/test_benchmarks.py",),
    # A buffer that is in use.
    ("tests/cli/test_plot.py",),
    ("tests/test_monitoring.py",),
    ("tests/torture/test_rules.py",),
)
_FIRST = {file: group[0] for group in GROUPS for file in group}


class GroupScheduling(LoadScopeScheduling):
    """Schedules groups first, the largest groups before the others, and then single tests."""

    def _split_scope(self, nodeid: str) -> str:
        return _FIRST.get(nodeid.partition("::")[0], nodeid)

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        """Removes finished tests, because the base class searches all scheduled tests each time."""
        super().mark_test_complete(node, item_index, duration)
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(self.assigned_work[node][scope].values()):
            del self.assigned_work[node][scope]
