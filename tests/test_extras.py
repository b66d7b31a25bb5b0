"""If an optional package is missing, the error names the right command to install it."""

from __future__ import annotations

import json
import pickle
import sys
from importlib import metadata
from pathlib import Path

import pytest

from shmbuffer.extras import MissingExtra, command, missing


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "a clone"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    return folder


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: object) -> None:
    """Puts pip's metadata of an installation in front of the real one."""
    folder = tmp_path / "site" / "shmbuffer-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: shmbuffer\nVersion: 0.1.0\n")
    if origin is not None:
        (folder / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(sys, "path", [str(folder.parent), *sys.path])


@pytest.mark.parametrize(("dir_info", "option"), [({}, ""), ({"editable": True}, "-e ")])
def test_from_a_clone_it_is_installed_again_with_the_extra(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clone: Path,
    dir_info: dict[str, bool],
    option: str,
) -> None:
    installed(tmp_path, monkeypatch, {"url": clone.as_uri(), "dir_info": dir_info})
    assert command("plot") == f'pip install {option}".[plot]" (in {clone})'


@pytest.mark.parametrize(
    "origin",
    [
        None,
        {"url": "file:///a/wheel.whl", "archive_info": {}},
        {"url": "file:///gone", "dir_info": {}},
    ],
)
def test_a_wheel_is_there_already_and_gets_the_extra_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: object
) -> None:
    installed(tmp_path, monkeypatch, origin)
    assert command("plot") == 'pip install "shmbuffer[plot]"'


def test_a_clone_that_is_not_installed_is_installed_with_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", nowhere)
    assert command("plot") == 'pip install ".[plot]"'


def test_the_error_says_what_needs_which_package_and_crosses_processes() -> None:
    error = missing("the demo needs gymnasium", "demo", name="gymnasium")
    again = pickle.loads(pickle.dumps(error))
    said = f"the demo needs gymnasium, which is not installed: {command('demo')}"
    assert isinstance(again, MissingExtra)
    assert (str(error), error.name, str(again)) == (said, "gymnasium", said)
