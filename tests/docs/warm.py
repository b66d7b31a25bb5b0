"""Runs scripts of a page in forks of a process that has imported torch, which saves seconds.

``python -SE tests/docs/warm.py ADDRESS script.py ARGUMENT...`` takes the place of such a script. It
passes on its descriptors, directory, environment and signals, and ends as the script does. If it is
killed, the script is killed, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def listen(address: str) -> socket.socket:
    """Returns a socket for requests, with a name outside the file system."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"\0{address}")
    listening.listen()
    return listening


def serve(listening: socket.socket) -> None:
    """Forks for each requested script; returns only in the forks, after each script has run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        asking, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _answer(asking)
            return
        asking.close()


def _answer(asking: socket.socket) -> None:
    """Watches a script until its end; returns in the fork that has run the script."""
    text, descriptors, _, _ = socket.recv_fds(asking, 2**20, 3)
    script = os.fork()
    if script == 0:
        asking.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _become(**json.loads(text))
        return
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(script)
    while ended not in select.select([asking, ended], [], [])[0]:
        passed_on = asking.recv(1)
        os.kill(script, passed_on[0] if passed_on else signal.SIGKILL)
        if not passed_on:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        asking.send(str(status).encode())
    os._exit(0)


def _become(arguments: list[str], directory: str, environment: dict[str, str]) -> None:
    """Runs a script as Python does, with its own random numbers."""
    import multiprocessing.process
    import random
    import runpy

    import numpy as np

    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.process.ORIGINAL_DIR = directory  # type: ignore[attr-defined]
    random.seed()
    np.random.seed()
    script = os.path.abspath(arguments[0])
    sys.argv = arguments
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


def ask(address: str, arguments: list[str]) -> int:
    """Requests a script; returns its exit status, negative for a signal."""
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asking.connect(f"\0{address}")
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: asking.send(bytes([number])))
    request = {
        "arguments": arguments,
        "directory": os.getcwd(),
        "environment": dict(os.environ),
    }
    socket.send_fds(asking, [json.dumps(request).encode()], [0, 1, 2])
    return int(asking.recv(16))


def main() -> None:
    """Stands in for a script; runs it directly if it inspects the imported modules."""
    with open(sys.argv[2]) as script:
        looks = "sys.modules" in script.read()
    if looks:
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    status = ask(sys.argv[1], sys.argv[2:])
    if status < 0:
        if -status in PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
