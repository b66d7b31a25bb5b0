"""Serves the requests of `peer.py`, which are lines of JSON, with a library in this process.

The peers import this module, so it must not import shmbuffer.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from typing import IO

from benchmarks.library import Operation
from benchmarks.local import Local


def serve(make: Callable[[], Local]) -> None:
    """Serves requests until standard input is closed."""
    # Locks that a buffer makes for itself are of the default context, and have to fit to its
    # processes.
    multiprocessing.set_start_method("forkserver", force=True)
    # What the library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    library = make()
    try:
        _answer(library, sys.stdin, answers)
    finally:
        library.close()


def _answer(library: Local, requests: IO[str], answers: IO[str]) -> None:
    for line in requests:
        request = json.loads(line)
        arguments = request["with"]
        if "operation" in arguments:
            arguments["operation"] = Operation(**arguments["operation"])
        try:
            answer = {"result": getattr(library, request["do"])(**arguments)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
