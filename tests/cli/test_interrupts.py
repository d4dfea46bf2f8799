"""Ctrl-C and a request to terminate end every command soon, without a traceback and without partial files."""

from __future__ import annotations

import json
import pkgutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from rlx_ort import Graph, cli, save_onnx

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a child is not sent Ctrl-C alone there")

CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
from rlx_ort.providers.engine.session import OrtEngineSession

run = OrtEngineSession.run

def announced(*arguments):
    print("running", flush=True)
    return run(*arguments)

OrtEngineSession.run = announced
{}
from rlx_ort.cli import main
main(sys.argv[1:])
"""

STUCK = """
import ctypes
OrtEngineSession.run = run
from rlx_ort.parity import compare

def compare_to(*arguments, **options):
    print("running", flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # another thread gets it, so that the call goes on
    ctypes.CDLL(None).sleep(60)

compare.compare_to = compare_to
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that runs for minutes, and in a moment with `n=1`."""
    graph = Graph("long")
    value = x = graph.input("x", ["n", "n"])
    for _ in range(1000):
        value = graph.tanh(value @ x)
    graph.outputs = [value + graph.param("w", [1], data=np.zeros(1, np.float32))]
    path = tmp_path_factory.mktemp("models") / "long.onnx"
    save_onnx(graph, path)
    return path


def interrupted(
    folder: Path, *command: object, program: str = "", how: signal.Signals = signal.SIGINT
) -> tuple[int, str, float]:
    """Run a command and stop it in its first run; return its exit code, its errors and the seconds that it took."""
    child = [sys.executable, "-c", CHILD.format(program), *map(str, command)]
    with subprocess.Popen(child, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        time.sleep(0.05)  # into the engine
        begun = time.perf_counter()
        process.send_signal(how)
        _, errors = process.communicate(timeout=60)
        return process.returncode, errors, time.perf_counter() - begun


@pytest.mark.parametrize(
    ("command", "how"),
    [
        ("run MODEL --dim n=1500 --device cpu --outputs out.npz", signal.SIGINT),
        ("bench MODEL --dim n=1500 --device cpu", signal.SIGINT),
        ("compare MODEL MODEL --dim n=1500", signal.SIGINT),
        ("convert MODEL out.onnx --dim n=1500", signal.SIGTERM),
        ("calibrate --device cpu", signal.SIGINT),
    ],
    ids=lambda value: value.partition(" ")[0] if isinstance(value, str) else value.name,
)
def test_a_signal_ends_a_command_in_its_run(
    command: str, how: signal.Signals, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In less than the grace time; a run is stopped at its next node, 50 ms apart here."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    code, errors, seconds = interrupted(tmp_path, *command.replace("MODEL", str(model)).split(), how=how)
    assert (code, errors.splitlines()[-1]) == (128 + how, "Interrupted"), errors
    assert "Traceback" not in errors
    assert seconds < 5.0  # 0.1 to 0.2 s on an idle machine
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == []
    assert list(tmp_path.glob("cache/calibration/*.json")) == []


def test_an_interrupt_before_the_command_begins_has_the_same_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its module is imported; the message is printed once, also for a command in a group."""
    find = pkgutil.resolve_name

    def interrupt(name: str) -> object:
        if name.endswith((":run", ".run:command")):
            raise KeyboardInterrupt
        return find(name)

    monkeypatch.setattr(pkgutil, "resolve_name", interrupt)
    for command in (["run"], ["package", "run"]):
        result = CliRunner().invoke(cli.main, command)
        assert (result.exit_code, result.stderr) == (130, "Interrupted\n")
        printed = json.loads(CliRunner().invoke(cli.main, [*command, "--json"]).stdout)
        assert (printed["error"]["type"], printed["error"]["exit_code"]) == ("Interrupted", 130)


def test_what_does_not_stop_is_left_after_the_grace_time(model: Path, tmp_path: Path) -> None:
    """The process ends, and files that are not complete are removed."""
    code, errors, seconds = interrupted(tmp_path, "convert", model, "out.json", "--dim", "n=1", program=STUCK)
    assert code == 128 + signal.SIGINT, errors
    assert "Traceback" not in errors
    assert 0.5 < seconds < 6.0
    assert list(tmp_path.iterdir()) == []
