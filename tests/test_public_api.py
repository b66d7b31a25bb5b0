"""Every public name is available from ``shmbuffer``, documented, and loaded lazily."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import shmbuffer
import shmbuffer.torchrl


@pytest.mark.parametrize("name", shmbuffer.torchrl.__all__)
def test_a_public_name_can_be_had_and_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(getattr(shmbuffer, name))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchBuffer"):
        shmbuffer.NoSuchBuffer  # noqa: B018


def test_a_module_that_needs_another_core_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would report a missing name in ``shmbuffer`` and would not mention the core."""
    (tmp_path / "of_other_sources.py").write_text(
        "from shmbuffer._native import _core\n_core.of_a_later_version()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(shmbuffer.names.HOME_OF, "Later", "of_other_sources")
    with pytest.raises(ImportError, match=r"of_a_later_version.*compile the core again"):
        from shmbuffer import Later  # type: ignore[attr-defined]  # noqa: F401


def test_dir_shows_the_public_names_only() -> None:
    assert dir(shmbuffer) == sorted([*shmbuffer.__all__, "__version__"])


def test_every_error_is_public() -> None:
    from shmbuffer import errors

    named = {
        name
        for name, thing in vars(errors).items()
        if inspect.isclass(thing) and issubclass(thing, errors.ShmBufferError)
    }
    assert named <= set(shmbuffer.torchrl.__all__)


@pytest.mark.parametrize("module", ["shmbuffer", "shmbuffer.memory", "shmbuffer.cli"])
def test_importing_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'tensordict' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
