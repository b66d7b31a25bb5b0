"""Every verb explains itself, shows an example and lists its exit codes; errors are sentences."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shmbuffer.cli import VERBS, exits, main
from tests.kit.programs import Program, run


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_has_an_example_and_the_exit_codes(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: shmbuffer {verb}")
    assert f"\n  shmbuffer {verb}" in text  # an example
    assert "exit codes:\n    0  " in text
    assert "--json" in text


def test_the_help_lists_all_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert list(VERBS) == [
        *(
            "serve",
            "list",
            "inspect",
            "ps",
            "top",
            "consumers",
            "set",
            "plot",
            "export",
            "check",
            "recover",
        ),
        *("stop", "gc", "demo"),
    ]
    for verb, summary in VERBS.items():
        assert verb in text
        assert summary.split(",")[0] in " ".join(text.split())
    assert exits.TABLE in text


def test_the_help_imports_no_verb() -> None:
    source = (
        "import sys\n"
        "from shmbuffer.cli import VERBS, main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "verbs = {f'shmbuffer.cli.{verb}' for verb in VERBS}\n"
        "print(verbs & sys.modules.keys(), 'numpy' in sys.modules)"
    )
    with Program.python(source) as program:
        assert program.end()[1].splitlines()[-1] == "set() False"


def test_a_verb_is_needed_and_has_to_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["vanish"], ["inspect"], ["inspect", "dir", "--colour"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == exits.USAGE
    assert "invalid choice: 'vanish'" in capsys.readouterr().err


def test_the_module_is_the_command(closed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("check", closed)
    assert main(["check", str(closed)]) == code == 0
    assert capsys.readouterr().out == out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        expected = version("shmbuffer")
    except PackageNotFoundError:
        pytest.skip("the package is not installed here")
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"shmbuffer {expected}\n"


@pytest.mark.product(few=1)
@pytest.mark.parametrize("verb", ["inspect", "check", "recover"])
def test_an_error_is_one_sentence_without_a_traceback(verb: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    code, out, err = run(verb, missing)
    assert (code, out) == (exits.NO_BUFFER, "")
    assert err.startswith(f"shmbuffer: {missing}: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_a_traceback_is_shown_on_demand(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for code, _, err in (
        run("check", missing, "--debug"),
        run("check", missing, SHMBUFFER_DEBUG="1"),
    ):
        assert code == 1
        assert err.startswith("Traceback")
        assert "BufferNotFoundError" in err
    assert "Traceback" not in run("check", missing, SHMBUFFER_DEBUG="0")[2]


def test_an_error_is_an_object_with_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    assert main(["inspect", str(tmp_path / "missing"), "--json"]) == exits.NO_BUFFER
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["error"] == "BufferNotFoundError"
    assert answer["exit"] == exits.NO_BUFFER
    assert answer["message"] in said.err


@pytest.mark.parametrize("verb", ["inspect", "recover"])
def test_a_missing_buffer_is_told_from_a_damaged_one(verb: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / ".shmbuffer").mkdir(mode=0o700)
    control = tmp_path / ".shmbuffer" / "control"
    control.write_bytes(b"x" * 143360)
    control.chmod(0o600)
    code, _, err = run(verb, tmp_path)
    assert code == exits.NO_BUFFER
    assert err == (
        f"shmbuffer: {tmp_path}: this is not a control file of shmbuffer; check the path. "
        "Nothing was changed\n"
    )
    assert control.read_bytes() == b"x" * 143360


def test_an_unexpected_error_is_called_a_bug(
    closed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("shmbuffer.memory.upkeep.inspect.inspect", broken)
    assert main(["inspect", str(closed)]) == exits.BUG
    assert capsys.readouterr().err == "shmbuffer: KeyError: 'oops' (a bug; --debug shows where)\n"
    with pytest.raises(KeyError):
        main(["inspect", str(closed), "--debug"])


def test_a_reader_that_goes_away_is_no_error(closed: Path) -> None:
    with Program(
        "bash",
        "-o",
        "pipefail",
        "-c",
        f"{sys.executable} -m shmbuffer inspect {closed} | true; echo ${{PIPESTATUS[0]}}",
    ) as program:
        code, out, err = program.end()
    assert (code, err) == (0, "")
    assert out.strip() in ("0", str(exits.READER_GONE))
