"""What every Python that a test starts does first, so that it costs less.

It collects garbage less often: a million objects come with torch. By default Python goes through
them again and again while they are imported, and once more when it ends: a third of what a program
costs that does little else.

It imports the compiler of torch late: tensordict tells it of a few functions, and for that torch
imports it, a third of what `import shmbuffer` and a buffer take. Here it is told when something
else imports it.
"""

import atexit
import gc
import sys
from importlib.machinery import PathFinder

gc.set_threshold(10_000, *gc.get_threshold()[1:])
# Registered before everything else, so that it runs after it: nothing is left to look for then.
atexit.register(gc.freeze)

_TOLD = ("allow_in_graph", "assume_constant_result")
_untold = []


def _tell_late(compiler):
    for tell in (getattr(compiler, name) for name in _TOLD):

        def told(function, tell=tell):
            """Return the function itself, as torch does."""
            if "torch._dynamo" in sys.modules:
                return tell(function)
            _untold.append((tell, function))
            return function

        setattr(compiler, tell.__name__, told)


def _tell(dynamo):
    sys.modules["torch"]._dynamo = dynamo  # as the import does next
    while _untold:
        tell, function = _untold.pop()
        tell(function)


class _Finder:
    """Finds the two modules as others do, and does more when they have been imported."""

    behind = {"torch.compiler": _tell_late, "torch._dynamo": _tell}  # noqa: RUF012

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in cls.behind:
            return None
        spec = PathFinder.find_spec(name, path, target)
        imported, more = spec.loader.exec_module, cls.behind[name]
        spec.loader.exec_module = lambda module: (imported(module), more(module))
        return spec


sys.meta_path.insert(0, _Finder)
