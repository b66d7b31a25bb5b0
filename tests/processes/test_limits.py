"""Resources that the system refuses: files of another user, memory, and large files.

One test copies a buffer by hard links. Each error names the resource, the place and a remedy.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    Coordinator,
    LazyMemmapStorage,
    ReadOnlyError,
    ShmBufferError,
    SpaceError,
    TensorDictReplayBuffer,
    UnsafePathError,
    attach,
)
from tests.crash.harness import ended, fork

NOBODY = 65534


def made(path: Path, items: int) -> TensorDictReplayBuffer:
    storage = LazyMemmapStorage(items, scratch_dir=path, shared_init=True)
    buffer = TensorDictReplayBuffer(storage=storage)
    buffer.extend(TensorDict({"obs": torch.zeros(items)}, [items]))
    return buffer


def refused(
    call: Callable[[], object], kind: type[Exception], text: str, *, after: Callable[[], None]
) -> None:
    """Makes a call that fails, in a process that first gives up a right or a resource."""

    def body() -> None:
        after()
        with pytest.raises(kind, match=text):
            call()

    assert ended(fork(body)) == 0


def be_nobody() -> None:
    os.setgid(NOBODY)
    os.setuid(NOBODY)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize(
    ("mode", "kind"), [(0o700, ReadOnlyError), (0o755, UnsafePathError)], ids=["private", "seen"]
)
@pytest.mark.parametrize("by", [attach, lambda path: Coordinator(path, capacity=8)])
def test_the_buffer_of_another_user_is_refused_with_both_users(
    fast_path: Path, mode: int, kind: type[ShmBufferError], by: Callable[[Path], object]
) -> None:
    path = fast_path / "buffer"
    made(path, 8).storage.close()
    fast_path.chmod(0o755)
    for folder in (path, path / ".shmbuffer"):
        folder.chmod(mode)
    text = rf"{path}: .*belongs to uid 0, .*this process runs as uid {NOBODY}; "
    refused(lambda: by(path), kind, text, after=be_nobody)


def limited(which: int, most: Callable[[], int]) -> Callable[[], None]:
    return lambda: resource.setrlimit(which, (most(), most()))


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def test_a_limit_on_the_memory_of_a_process_is_named(fast_path: Path) -> None:
    path = fast_path / "buffer"
    made(path, 2_000_000).storage.close()
    refused(
        lambda: attach(path),
        SpaceError,
        r"this process can map at most .*: raise `ulimit -v`",
        after=limited(resource.RLIMIT_AS, lambda: mapped_bytes() + 2**22),
    )


def test_a_limit_on_open_files_is_named(fast_path: Path) -> None:
    made(fast_path / "buffer", 4).storage.close()
    refused(
        lambda: attach(fast_path / "buffer"),
        OSError,
        rf"Too many open files: close some files, or raise `ulimit -n`: '{fast_path}/buffer",
        after=limited(resource.RLIMIT_NOFILE, lambda: len(os.listdir("/proc/self/fd"))),
    )


def test_a_limit_on_the_size_of_files_is_named_by_a_save(fast_path: Path) -> None:
    buffer = made(fast_path / "buffer", 2_000_000)
    save = fast_path / "save"
    refused(
        lambda: buffer.dumps(save),
        SpaceError,
        rf"{save}.*: .* this process can write files of at most 1.0 MiB .*: raise `ulimit -f`",
        after=limited(resource.RLIMIT_FSIZE, lambda: 2**20),
    )
    assert not save.exists()
    buffer.dumps(save)


def test_a_copy_by_hard_links_is_named_with_what_finds_it(fast_path: Path) -> None:
    path, linked = fast_path / "buffer", fast_path / "linked"
    buffer = made(path, 8)
    shutil.copytree(path, linked, copy_function=os.link)
    with pytest.raises(
        UnsafePathError, match=r"2 names .* `cp -al`.* copy the directory with `cp -r`"
    ) as caught:
        attach(path)
    command = re.search(r"`(find .* -samefile .*?)`", str(caught.value))
    assert command is not None
    found = subprocess.run(command[1].split(), capture_output=True, text=True)
    assert set(found.stdout.split()) == {
        str(path / ".shmbuffer/control"),
        str(linked / ".shmbuffer/control"),
    }
    buffer.extend(TensorDict({"obs": torch.ones(4)}, [4]))  # an attached client goes on
    shutil.rmtree(linked)
    with attach(path) as other:
        assert other[:]["obs"].sum() == 4
