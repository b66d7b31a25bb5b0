"""`scripts/mutants [--full] [NAME...]`: runs the tests against all mutants, or the named ones."""

from __future__ import annotations

import argparse
import sys
import time

from tests.mutants.hunt import SurvivedError, kill, require_that_they_pass
from tests.mutants.mutant import mutants
from tests.mutants.tree import DoesNotApplyError
from tests.native.program import CompileError


def main() -> int:
    """Returns the exit status 0 if the tests have caught every mutant."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=main.__doc__)
    parser.add_argument("names", nargs="*", help="numbers or parts of names; none: all")
    parser.add_argument("--full", action="store_true", help="all cases of the tests, not a sample")
    given = parser.parse_args()
    names, full = given.names, given.full
    chosen = [
        mutant
        for mutant in mutants()
        if not names or any(name in mutant.path.stem for name in names)
    ]
    survivors = 0
    if not chosen:
        parser.error(f"no mutant is called {' or '.join(names)}")
    tests = (name for mutant in chosen for name in mutant.caught_by)
    cases = require_that_they_pass(tests, full=full)
    print(f"{cases} test cases pass where nothing is broken", flush=True)
    for mutant in chosen:
        began = time.monotonic()
        try:
            told = f"noticed, failed test cases: {kill(mutant, full=full)}"
        except (SurvivedError, DoesNotApplyError, CompileError) as error:
            survivors += 1
            told = f"SURVIVED: {error}"
        print(f"{mutant.path.stem}: {told} ({time.monotonic() - began:.1f} s)", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
