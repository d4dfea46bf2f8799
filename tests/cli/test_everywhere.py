"""What holds for every command: how much it prints, whole summaries and digests, one exit code for missing extras."""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path

import click
import pytest
from command_line import Cli
from rich.console import Console

from rlx_ort.cli import show
from rlx_ort.serving import tracing

EXTRAS = {
    "plot": ("matplotlib.figure", "report {model} --plot {folder}/picture.png"),
    "ray": ("ray", "serve {model} --ray --http 0 --grpc -1"),
    "otel": ("opentelemetry", "serve {model} --http 0 --grpc -1 --traces"),
    "convert": ("onnx_ir", "convert {model} {folder}/simple.onnx --simplify"),
    "sign": ("model_signing", "package sign {package} --key {key}"),
}
"""Extra -> the module that is not there, and a command that needs it."""


def test_quiet_prints_results_and_no_notes(cli: Cli, add_one: Path) -> None:
    """Before the command or among its options, and not for the next command."""
    for words in (("-q", "run", add_one, "--device", "cpu"), ("run", add_one, "--device", "cpu", "--quiet")):
        outcome = cli(*words)
        assert (outcome.code, outcome.err) == (0, "")
        assert "placement" in outcome.out
    assert "random inputs" in cli("run", add_one, "--device", "cpu").err


def test_quiet_prints_errors(cli: Cli, add_one: Path) -> None:
    """And the exit code is the same."""
    cli("run", add_one, "--device", "tpu", "-q").fails(3, "TPU is not available")


@pytest.mark.parametrize(("flag", "level"), [("-v", "INFO"), ("-vv", "DEBUG")])
def test_verbose_logs_to_stderr(cli: Cli, add_one: Path, flag: str, level: str) -> None:
    """What is done has a line each; the logger is as before afterwards."""
    before = logging.getLogger("rlx_ort").level
    outcome = cli("run", add_one, "--device", "cpu", flag)
    assert re.search(r"^INFO rlx_ort\.execution\.engine: graph .* opened on cpu", outcome.err, re.MULTILINE)
    assert "INFO" not in outcome.out
    assert (level == "DEBUG") or "DEBUG" not in outcome.err
    assert logging.getLogger("rlx_ort").level == before
    assert "INFO" not in cli("run", add_one, "--device", "cpu").err


@pytest.mark.parametrize("words", [("--help",), ("package", "--help"), ("cache", "--help")])
def test_summaries_of_commands_are_whole(cli: Cli, words: tuple[str, ...]) -> None:
    """In the width of a terminal no sentence is cut."""
    commands = cli(*words).out.split("\nCommands:\n")[1].split("\n\n")[0]
    assert "..." not in commands
    assert [line for line in commands.splitlines() if len(line) > 80] == []
    assert re.search(r"\.$", commands)


def test_digests_are_whole_and_can_be_copied(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """The key that `package warm` and `cache list` print is the one that `cache explain` takes."""
    package = tmp_path / "m.ortpackage"
    assert cli("package", "create", add_one, "-o", package, "--only", "cpu").code == 0
    lines = re.compile(r"^([0-9a-f]{32,}) ", re.MULTILINE)
    [key] = lines.findall(cli("package", "warm", package, "--device", "cpu").out)
    assert key in lines.findall(cli("cache", "list").out)
    assert cli("cache", "explain", key, "--json").document["key"] == key


def test_times_have_units(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """Also that of warming, which was a bare number of seconds."""
    package = tmp_path / "m.ortpackage"
    assert cli("package", "create", add_one, "-o", package, "--only", "cpu").code == 0
    [row] = [line for line in cli("package", "warm", package, "--device", "cpu").out.splitlines() if " cpu " in line]
    assert re.search(r"\d (ms|s) ", row)


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_extra_has_one_exit_code(
    cli: Cli, add_one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    """And the last line is the command that installs it."""
    module, command = EXTRAS[extra]
    for name in [module, *(name for name in sys.modules if name.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)  # Python finds a submodule that is loaded without its package
    for name in [
        name for name in sys.modules if name.startswith(("rlx_ort.serving.host", "rlx_ort.converters.onnx_ir"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    tracing._api.cache_clear()  # another test may have found OpenTelemetry
    package, key = tmp_path / "m.ortpackage", tmp_path / "key.pem"
    if extra == "sign":
        assert cli("package", "create", add_one, "-o", package).code == 0
        key.write_text("", encoding="utf-8")
    words = command.format(model=add_one, folder=tmp_path, package=package, key=key).split()
    cli(*words).fails(10, f'pip install ".[{extra}]"')


def test_a_known_length_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that are done stand beside those of the whole; --quiet shows nothing."""
    screen = io.StringIO()
    monkeypatch.setattr(show, "is_terminal", lambda stream: True)
    monkeypatch.setattr(show, "_console", lambda stderr: Console(file=screen, force_terminal=True, width=80))
    with show.counted("hashing", 2048) as step:
        assert step is not None
        step(1024)
    assert "hashing: 1 KiB of 2 KiB" in screen.getvalue()
    with click.Context(click.Command("quiet")) as context:
        show.set_loudness(context, click.Option(["--quiet"]), 1)
        with show.counted("hashing", 2048) as step:
            assert step is None
