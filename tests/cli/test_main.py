"""The command itself: help, exit codes, and the one place where errors become text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from command_line import Cli

from rlx_ort import errors
from rlx_ort.cli import main

COMMANDS = ("devices", "doctor", "inspect", "report", "run", "convert")


def _python(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, encoding="utf-8", check=False)


def test_help_lists_every_command_and_exit_code(cli: Cli) -> None:
    """`--help` names each command and says what each exit code means."""
    outcome = cli("--help")
    assert outcome.code == 0
    assert [name for name in COMMANDS if f"\n  {name} " not in outcome.out] == []
    assert [code for code in range(8) if f"\n    {code}  " not in outcome.out] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(cli: Cli, name: str) -> None:
    """`rlx-ort COMMAND --help` works for each command."""
    outcome = cli(name, "--help")
    assert (outcome.code, outcome.out.startswith("Usage: ")) == (0, True)


def test_help_loads_the_commands_and_nothing_below_them(tmp_path: Path) -> None:
    """Printing the help imports the command line and its errors: no other part of the package, no engine, no numpy."""
    program = (
        "import sys, rlx_ort.cli\n"
        "rlx_ort.cli.main(['--help'], standalone_mode=False)\n"
        "print('loaded:', *(name for name in sys.modules if name.startswith('rlx_ort')))\n"
        "print('loaded:', *(n for n in ('onnxruntime', 'onnx', 'onnx_ir', 'rich', 'numpy') if n in sys.modules))"
    )
    result = _python("-c", program, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    ours, others = (set(line.split()[1:]) for line in result.stdout.splitlines()[-2:])
    assert {name for name in ours if not name.startswith("rlx_ort.cli")} == {"rlx_ort", "rlx_ort.errors"}
    assert others == set()


@pytest.mark.parametrize(("given", "shown"), [(None, False), ("0", False), ("1", True)])
def test_warnings_of_the_engine_are_hidden_unless_asked_for(tmp_path: Path, given: str | None, shown: bool) -> None:
    """As a weight that no node uses gives; programs keep ONNX Runtime's own setting."""
    model = "agraph (float[1] x) => (float[1] y) <float[1] unused = {1}> { y = Neg(x) }"
    program = (
        "import click, onnx, rlx_ort.cli\n"
        "@rlx_ort.cli.main.command('warn')\n"
        "def warn():\n"
        "    from rlx_ort.providers.engine.runtime import onnxruntime\n"
        f"    model = onnx.helper.make_model(onnx.parser.parse_graph('{model}'), ir_version=8)\n"
        "    model.opset_import[0].version = 17\n"
        "    onnxruntime().InferenceSession(model.SerializeToString(), providers=['CPUExecutionProvider'])\n"
        "type(rlx_ort.cli.main).get_command = lambda self, ctx, name: warn\n"
        "rlx_ort.cli.main(['warn'])"
    )
    environment = {name: text for name, text in os.environ.items() if name != "RLX_ENGINE_WARNINGS"}
    result = _python(
        "-c", program, cwd=tmp_path, env=environment | ({} if given is None else {"RLX_ENGINE_WARNINGS": given})
    )
    said = result.stderr.replace("\0", "")  # on Windows the engine writes UTF-16 among our UTF-8
    assert (result.returncode, "unused" in said) == (0, shown), said


def test_the_console_script_is_installed(tmp_path: Path) -> None:
    """`rlx-ort --version` runs as a program of its own and prints the version."""
    script = Path(sys.executable).with_name("rlx-ort.exe" if sys.platform == "win32" else "rlx-ort")
    result = subprocess.run([script, "--version"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.split()[0]) == (0, "rlx-ort,")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RlxError("base"), 1),
        (errors.DeviceParseError("gpuu", "unknown"), 2),
        (errors.NoViableDeviceError("none left"), 3),
        (errors.ConversionError("no model"), 4),
        (errors.InputError("missing input"), 5),
        (errors.CalibrationError("too noisy"), 6),
        (errors.IntegrityError("wrong hash"), 7),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_becomes_its_text_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: errors.RlxError, code: int
) -> None:
    """What the library raises on purpose is printed on stderr, without a traceback, with its own exit code."""

    @click.command()
    def failing() -> None:
        raise error

    monkeypatch.setattr("rlx_ort.cli.devices.command", failing)
    result = CliRunner().invoke(main, ["devices"])
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"Error: {error}\n")


def test_an_unexpected_exception_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of ours keeps its traceback."""

    @click.command()
    def broken() -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("rlx_ort.cli.devices.command", broken)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        CliRunner().invoke(main, ["devices"], catch_exceptions=False)


@pytest.mark.parametrize("name", ["inspect", "report", "run"])
def test_a_file_that_is_no_model_is_a_model_error(cli: Cli, tmp_path: Path, name: str) -> None:
    """A file of other content is exit code 4, with the path in the message and nothing on stdout."""
    path = tmp_path / "not_a_model.onnx"
    path.write_bytes(b"\x00\xffthis is no model" * 10)
    outcome = cli(name, path, "--json")
    assert (outcome.code, outcome.document["error"]["exit_code"]) == (4, 4)
    assert "not_a_model.onnx" in outcome.err
