"""Data sets of other programs, as buffers: by a name that says where they come from.

    "minari:door/human-v2"    minari    what Minari has on this machine
    "parquet:runs.parquet"    parquet   a file of columns
    Path("/data/hopper")                a directory that a `ReadOnlyStorage` opens

What comes from files of another form is converted once, into a directory beside the others of its
kind, and mapped from there.
"""

from shmbuffer.replay.datasets.loading import load_dataset
from shmbuffer.replay.datasets.prefill import prefill_replay_buffer

__all__ = ["load_dataset", "prefill_replay_buffer"]
