"""Helpers for tests of several folders:

    rings       the engine and the ring behind a handle, which are reached only by this module
    items       items that follow from their numbers, an item of each kind, and a comparison
    programs    programs in processes of their own, and their reports

`tests/memory/rows.py` writes and reads rings by address, `tests/crash/harness.py` kills processes
at named points, and `tests/replay/conformance.py` makes every kind of buffer. A helper with users
in one folder lives in that folder, and a helper with one user beside it.

`rings` and `programs` import neither torch nor tensordict, for tests that fork thousands of times.
"""
