"""Published files: one wheel for every CPython and torch, and sources that can be built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from shmbuffer._native import _core

ROOT = Path(__file__).parents[1]

# Published code is compiled with all optimizations, which takes a while.
compiled = pytest.mark.full


def run(
    command: Sequence[str | Path], *, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program without our environment variables; returns stdout and stderr together."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command,
        cwd=cwd,
        env={**inherited, "SHMBUFFER_WERROR": "", "SHMBUFFER_SANITIZE": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the repository without built files, so that no stale file gets into a wheel."""
    built = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    tree = tmp_path_factory.mktemp("sources") / "tree"
    return Path(shutil.copytree(ROOT, tree, symlinks=True, ignore=built))


@pytest.fixture(scope="module")
def published(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `python -m build`, which makes the source distribution and from it the wheel."""
    directory = tmp_path_factory.mktemp("published")
    built = run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", directory], cwd=sources
    )
    assert built.returncode == 0, built.stdout
    return directory


@pytest.fixture(scope="module")
def wheel(published: Path) -> Path:
    (wheel,) = published.glob("*.whl")
    return wheel


@pytest.fixture(params=["here", pytest.param("wheel", marks=compiled)])
def core(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Returns the compiled core of this environment, and that of the wheel."""
    if request.param == "here":
        return Path(_core.__file__)
    with zipfile.ZipFile(request.getfixturevalue("wheel")) as archive:
        return Path(archive.extract("shmbuffer/_native/_core.abi3.so", tmp_path))


@compiled
def test_one_wheel_serves_every_cpython(wheel: Path) -> None:
    assert re.fullmatch(r"shmbuffer-[\w.]+-cp311-abi3-linux_\w+\.whl", wheel.name)


@compiled
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    demo = {f"shmbuffer/examples/{path.name}" for path in ROOT.glob("examples/demo/*.py")}
    assert {"shmbuffer/py.typed", "shmbuffer/__init__.py", *demo} <= set(names)
    assert [
        name for name in names if not re.fullmatch(r"shmbuffer/.*(\.pyi?|\.so|py\.typed)", name)
    ] == []


@pytest.mark.full
def test_the_source_distribution_holds_all_that_the_core_is_made_of(
    sources: Path, tmp_path: Path
) -> None:
    built = run(
        [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", tmp_path],
        cwd=sources,
    )
    assert built.returncode == 0, built.stdout
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        packed = {Path(*Path(name).parts[1:]) for name in members.getnames()}
    native = {path.relative_to(ROOT) for path in ROOT.glob("shmbuffer/_native/*/*.[ch]")}
    assert native
    assert native <= packed
    assert {Path("scripts/test"), Path("tests/conftest.py"), Path("constraints.txt")} <= packed


def test_the_core_needs_nothing_but_the_c_library(core: Path) -> None:
    dynamic = run(["readelf", "--dynamic", "--wide", core], cwd=core.parent)
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic.stdout)
    assert "libc.so.6" in needed
    assert [
        name
        for name in needed
        if not re.match(r"(libc|libm|libpthread|librt|ld-linux.*)\.so", name)
    ] == []


def test_the_core_shows_one_symbol_and_asks_for_none_of_torch(core: Path) -> None:
    table = run(["readelf", "--dyn-syms", "--wide", core], cwd=core.parent)
    symbols = [
        line.split()[6:8] for line in table.stdout.splitlines() if re.match(r" *\d+: ", line)
    ]
    defined = [name[0] for section, *name in symbols if section != "UND" and name]
    asked = [name[0] for section, *name in symbols if section == "UND" and name]
    assert defined == ["PyInit__core"]
    assert "PyModuleDef_Init" in asked or "PyModule_Create2" in asked
    assert [name for name in asked if re.search(r"torch|c10|_Z", name)] == []


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a virtual environment with only the wheel and numpy."""
    directory = tmp_path_factory.mktemp("installed")
    venv = directory / "venv"
    made = run([sys.executable, "-m", "venv", "--without-pip", venv], cwd=directory)
    assert made.returncode == 0, made.stdout
    python = venv / "bin" / "python"
    # The pip of this environment installs into it; numpy is linked, which saves a download.
    installed = run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel],
        cwd=directory,
    )
    assert installed.returncode == 0, installed.stdout
    (site_packages,) = venv.glob("lib/python*/site-packages")
    numpy = find_spec("numpy")
    assert numpy is not None
    assert numpy.origin is not None
    for part in Path(numpy.origin).parents[1].glob("numpy*"):
        (site_packages / part.name).symlink_to(part)
    return venv


@compiled
def test_the_demo_is_in_the_wheel(venv: Path, tmp_path: Path) -> None:
    shown = run([venv / "bin" / "shmbuffer", "demo", "--help"], cwd=tmp_path)
    assert shown.returncode == 0, shown.stdout
    assert "Trains a double DQN on CartPole-v1" in shown.stdout
    asked = run([venv / "bin" / "shmbuffer", "demo"], cwd=tmp_path)
    assert "the demo needs gymnasium, which is not installed" in asked.stdout


@compiled
def test_the_memory_floor_runs_where_there_is_only_numpy(venv: Path, tmp_path: Path) -> None:
    program = (
        "import importlib.util, shmbuffer.memory, shmbuffer._native._core as core;"
        "assert importlib.util.find_spec('torch') is None;"
        "print(core.__file__)"
    )
    imported = run([venv / "bin" / "python", "-c", program], cwd=tmp_path)
    assert imported.returncode == 0, imported.stdout
    assert Path(imported.stdout.strip()).is_relative_to(venv)


@pytest.mark.full
def test_without_a_compiler_the_install_stops_with_one_sentence(
    sources: Path, tmp_path: Path
) -> None:
    installed = run(
        [
            sys.executable,
            *["-m", "pip", "install", "--no-deps", "--no-build-isolation"],
            *["--target", str(tmp_path / "target"), str(sources)],
        ],
        cwd=tmp_path,
        CC="/nonexistent",
    )
    assert installed.returncode != 0
    sentence = (
        "shmbuffer needs a C compiler and the headers of Python to build its core, "
        "and '/nonexistent' cannot be run: install both"
    )
    assert sentence in installed.stdout
    assert "Traceback" not in installed.stdout
    assert not (tmp_path / "target").exists()
