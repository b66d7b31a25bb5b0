"""Defines the exit codes of the subcommands, and prints error messages."""

from __future__ import annotations

import json
import sys

from shmbuffer import errors
from shmbuffer.extras import MissingExtra
from shmbuffer.watch.tables import clean

DONE, DAMAGED, USAGE, NO_BUFFER, REFUSED = 0, 1, 2, 3, 4
BUG, INTERRUPTED, READER_GONE = 70, 130, 141

TABLE = """\
exit codes:
    0  success; the buffer is undamaged
    1  the buffer is damaged
    2  invalid arguments
    3  there is no buffer, or none that this version can read
    4  refused: the buffer is in use or exists already, there is no space or permission,
       another process did not respond in time, or a package is missing
   70  a bug in shmbuffer
  130  interrupted with Ctrl-C"""

_CODES: list[tuple[type[BaseException], int]] = [
    (errors.CorruptBufferError, DAMAGED),
    (errors.BufferNeedsRestart, DAMAGED),
    (errors.BufferNotFoundError, NO_BUFFER),
    (errors.FormatError, NO_BUFFER),
    (errors.UnsafePathError, NO_BUFFER),
    (errors.ShmBufferError, REFUSED),
    (OSError, REFUSED),
    (MissingExtra, REFUSED),
    (ValueError, USAGE),
]


def code_of(error: BaseException) -> int:
    """Returns the exit code for an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), BUG)


def explain(error: BaseException, *, as_json: bool = False) -> int:
    """Prints an error on stderr and returns the exit code.

    With ``as_json`` the error is also printed on stdout as JSON.
    """
    code = code_of(error)
    sentence = " ".join(clean(error).split()) or type(error).__name__
    if code == BUG:
        sentence = f"{type(error).__name__}: {sentence} (a bug; --debug shows where)"
    print(f"shmbuffer: {sentence}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": type(error).__name__, "message": sentence, "exit": code}))
    return code
