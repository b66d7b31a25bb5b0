"""The command line: ``shmbuffer VERB ...``.

Each verb has its own module, which is imported only when the verb is used. The module defines
``DESCRIPTION``, ``EXAMPLES``, ``add_arguments(parser)`` and ``run(args)``, which returns the exit
code. Importing the module does not import torch. A verb that needs torch imports it in ``run``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from shmbuffer.cli import exits

VERBS = {
    "serve": "create or recover a buffer and run its coordinator in the foreground",
    "list": "list the buffers below a directory",
    "inspect": "show the contents of a buffer and its clients",
    "ps": "list the processes that use a buffer, and the locks and slots that they hold",
    "top": "monitor a buffer in use: rates, priorities and clients",
    "consumers": "list the consumers of a buffer, or remove one",
    "set": "change the rate limiter of a buffer",
    "plot": "plot a buffer's recorded history, and list warnings",
    "export": "export the items of a buffer to Parquet, HDF5 or a TensorDict",
    "check": "check a buffer for damage",
    "recover": "recover a buffer after a crash, and report what was repaired",
    "stop": "stop every process that uses a buffer",
    "gc": "remove temporary buffers that were left behind by killed processes",
    "demo": "train on CartPole, kill all processes, recover, and continue until it is solved",
}

EPILOG = f"""\
examples:
  shmbuffer serve run/buffer --capacity 1000000    serve a buffer on this machine, until Ctrl-C
  shmbuffer inspect run/buffer                     show its contents and clients
  shmbuffer VERB --help                            list the options of a verb, with examples

{exits.TABLE}

list, inspect, ps, top, plot and check do not change the buffer. Every verb works while the
buffer is in use and after all its processes have died.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` and returns the exit code."""
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    verb = next((word for word in arguments if not word.startswith("-")), None)
    module = importlib.import_module(f"shmbuffer.cli.{verb}") if verb in VERBS else None
    args = _parser(verb, module).parse_args(arguments)
    if module is None:
        raise AssertionError("argparse refuses unknown verbs")
    return _run(module, args)


def _parser(verb: str | None, module: ModuleType | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shmbuffer",
        description="Starts, monitors, checks and recovers replay buffers in shared memory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name, summary in VERBS.items():
        one = verbs.add_parser(name, help=summary, formatter_class=parser.formatter_class)
        if name == verb and module is not None:
            _fill(one, module)
    return parser


def _fill(parser: argparse.ArgumentParser, module: ModuleType) -> None:
    """Adds the description, the common options and the arguments of a verb to its parser."""
    examples = "\n".join(f"  {line}" for line in module.EXAMPLES.splitlines())
    parser.description = module.DESCRIPTION
    parser.epilog = f"examples:\n{examples}\n\n{exits.TABLE}\n"
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error (or SHMBUFFER_DEBUG=1)"
    )
    module.add_arguments(parser)


def _run(module: ModuleType, args: argparse.Namespace) -> int:
    try:
        code: int = module.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has closed the output. Python would report this again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.READER_GONE
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except Exception as error:
        if getattr(args, "debug", False) or os.environ.get("SHMBUFFER_DEBUG", "") not in ("", "0"):
            raise
        return exits.explain(error, as_json=getattr(args, "json", False))


class _Version(argparse.Action):
    """Prints the version.

    It is read only if requested, because this takes longer than everything else at startup.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"shmbuffer {version('shmbuffer')}")
        parser.exit()
