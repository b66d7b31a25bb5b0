"""The command line: ``shmbuffer VERB ...``, one file a verb, each imported when it is asked for.

A verb has ``DESCRIPTION``, ``EXAMPLES``, ``add_arguments(parser)`` and ``run(args)``, which returns
the exit code. Nothing here imports torch; a verb that needs it imports it in ``run``.
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
    "serve": "make or recover a buffer and look after it in the foreground",
    "list": "list the buffers below a directory",
    "inspect": "say what is in a buffer and who uses it",
    "ps": "list the processes that use a buffer, and what each of them holds",
    "top": "show a buffer while it is used: rates, priorities, who does what",
    "consumers": "list who consumes the items of a buffer, and remove one that nobody serves",
    "set": "change what keeps writers and samplers in step",
    "plot": "plot a buffer's recorded history, and list warnings",
    "export": "write the items of a buffer to a Parquet or HDF5 file, or a TensorDict",
    "check": "say whether a buffer is whole",
    "recover": "make a buffer whole after a crash, and say what that took",
    "stop": "end every process that uses a buffer",
    "gc": "remove what killed processes left in the folder for temporary files",
    "demo": "train on CartPole, kill everything, recover, go on until it is solved",
}

EPILOG = f"""\
examples:
  shmbuffer serve run/buffer --capacity 1000000    a buffer for this machine, until Ctrl-C
  shmbuffer inspect run/buffer                     what is in there, who uses it
  shmbuffer VERB --help                            the options of a verb, with an example

{exits.TABLE}

list, inspect, ps, top, plot and check change nothing. Every verb works while the buffer is used,
and on what a dead run left behind.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    verb = next((word for word in arguments if not word.startswith("-")), None)
    module = importlib.import_module(f"shmbuffer.cli.{verb}") if verb in VERBS else None
    args = _parser(verb, module).parse_args(arguments)
    if module is None:
        raise AssertionError("argparse lets no unknown verb through")
    return _run(module, args)


def _parser(verb: str | None, module: ModuleType | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shmbuffer",
        description="Replay buffers in shared memory, from the outside.",
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
    """Adds what all verbs have in common, and what this one has."""
    examples = "\n".join(f"  {line}" for line in module.EXAMPLES.splitlines())
    parser.description = module.DESCRIPTION
    parser.epilog = f"examples:\n{examples}\n\n{exits.TABLE}\n"
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--debug", action="store_true", help="show where an error came from (or SHMBUFFER_DEBUG=1)"
    )
    module.add_arguments(parser)


def _run(module: ModuleType, args: argparse.Namespace) -> int:
    try:
        code: int = module.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output has gone. At exit Python would complain again about the unwritten
        # rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.READER_GONE
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except Exception as error:
        if getattr(args, "debug", False) or os.environ.get("SHMBUFFER_DEBUG", "") not in ("", "0"):
            raise
        return exits.explain(error, as_json=getattr(args, "json", False))


class _Version(argparse.Action):
    """Looks the version up when it is asked for, which takes longer than the rest of the start."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"shmbuffer {version('shmbuffer')}")
        parser.exit()
