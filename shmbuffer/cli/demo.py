"""``shmbuffer demo``: trains on CartPole, kills its processes, recovers and continues.

The program is examples/demo in the repository; a wheel has it as ``shmbuffer.examples``.
"""

from shmbuffer.examples.command import DESCRIPTION, EXAMPLES, add_arguments, run

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "run"]
