"""Benchmarks: one question per file, answered for shmbuffer and the installed peers side by side.

    python -m benchmarks                        all benchmarks, with the peers that scripts/peers
    installed python -m benchmarks extend cycle --items M two questions, with items of 3 KB python
    -m benchmarks --help python -m benchmarks.instructions           counts instructions; needs no
    quiet machine

Compare ratios within one table instead of microseconds. The libraries are measured in turn within
each round, so that other programs disturb all of them.
"""
