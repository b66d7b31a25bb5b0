"""Implements ``shmbuffer demo``: trains on CartPole, kills the processes, recovers and continues.

The program is in the folder ``examples/demo`` of the repository. Wheels contain it as
``shmbuffer.examples``.
"""

from shmbuffer.examples.command import DESCRIPTION, EXAMPLES, add_arguments, run

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "run"]
