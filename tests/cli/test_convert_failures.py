"""`convert` when things go wrong: damaged and hostile files, a full disk, and being stopped half way."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import Cli
from sample_models.source_files import SOURCES, Trap, small_graph, write_source

from rlx_ort import Graph, save_onnx

MODELS = ("onnx", "onnx-external", "json")
WEIGHTS = tuple(kind for kind in SOURCES if kind not in MODELS)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a small model in a folder of its own."""
    (tmp_path / "source").mkdir()
    path = tmp_path / "source" / "small.onnx"
    save_onnx(small_graph(), path)
    return path


def _nothing_in(folder: Path) -> bool:
    return list(folder.iterdir()) == []


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return an empty folder for targets, in which nothing may be left behind."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_was_cut_off_is_refused(cli: Cli, tmp_path: Path, out: Path, kind: str, share: float) -> None:
    """Exit code 4 and no file, wherever the end is missing; with external data, of either file."""
    path = write_source(kind, tmp_path)
    for file in (path, path.with_name(f"{path.name}.data"), path.with_suffix(".safetensors")):
        if file.exists():
            content = file.read_bytes()
            file.write_bytes(content[: int(len(content) * share)])
            outcome = cli("convert", path, out / "b.onnx", "--no-verify")
            assert outcome.code == 4, (file, outcome.out)
            assert outcome.err.startswith("Error: ")
            assert _nothing_in(out)
            file.write_bytes(content)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_were_cut_off_are_refused(cli: Cli, small: Path, tmp_path: Path, out: Path, kind: str) -> None:
    """Half a weight file is none."""
    path = write_source(kind, tmp_path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    outcome = cli("convert", small, out / "b.onnx", "--params", path)
    assert outcome.code == 4
    assert _nothing_in(out)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_pickle_is_refused_and_never_loaded(cli: Cli, small: Path, tmp_path: Path, out: Path, zipped: bool) -> None:
    """Neither as a model nor as weights, plain or in the archive that torch.save writes."""
    path, sprung = tmp_path / "model.pt", tmp_path / "sprung"
    payload = pickle.dumps({"w": Trap(sprung)}, protocol=2)
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("model/data.pkl", payload)
            archive.writestr("model/version", "3\n")
    else:
        path.write_bytes(payload)
    for arguments in ((path, out / "b.onnx"), (small, out / "b.onnx", "--params", path)):
        cli("convert", *arguments).fails(4, "never")
    assert not sprung.exists()
    assert _nothing_in(out)


@pytest.mark.parametrize("option", ["--params", "--inputs"])
def test_a_zip_bomb_is_refused(cli: Cli, small: Path, tmp_path: Path, out: Path, option: str) -> None:
    """An archive of 100 KB that would unpack to 100 MB is not unpacked."""
    bomb = tmp_path / "bomb.npz"
    np.savez_compressed(bomb, x=np.zeros(100 << 20, np.uint8))
    outcome = cli("convert", small, out / "b.onnx", option, bomb)
    assert outcome.code in (4, 5)
    assert "unpack" in outcome.err
    assert _nothing_in(out)


def test_a_file_of_no_known_kind_is_refused(cli: Cli, tmp_path: Path, out: Path) -> None:
    """Whatever its name says; the message lists what is known."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"MZ\x90\x00 a program, not a model" * 50)
    outcome = cli("convert", path, out / "b.json")
    assert outcome.code == 4
    assert _nothing_in(out)


LIMITED = """
import resource, signal, sys
from rlx_ort.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write beyond the limit fails as one on a full disk does
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
main(sys.argv[1:])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit for the size of files")
@pytest.mark.parametrize("target", ["b.onnx", "b.json", "b.ort"])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, small: Path, out: Path, target: str) -> None:
    """When a file cannot be written to its end: a message, an exit code, and the old target as it was."""
    (out / target).write_bytes(b"old")
    large = tmp_path / "large.onnx"
    graph = Graph("large")
    x = graph.input("x", [1, 64])
    graph.outputs = [x @ graph.param("w", [64, 64], data=np.ones((64, 64), np.float32))]
    save_onnx(graph, large)
    command = [sys.executable, "-c", LIMITED, "convert", str(large), str(out / target), "--force"]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert result.returncode in (5, 9), result.stderr
    assert result.stderr.startswith("Error: ")
    assert [(path.name, path.read_bytes()) for path in out.iterdir()] == [(target, b"old")]


STOPPED = """
import signal, sys, time
from rlx_ort.cli import main
from rlx_ort.parity import compare

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored

def compare_to(*arguments, **options):
    print("staged", flush=True)
    time.sleep(60)

compare.compare_to = compare_to
main(sys.argv[1:])
"""


def _stopped(source: Path, target: Path, how: int) -> int:
    """Start a conversion, stop it when its files are written and not yet in place, and return its exit code."""
    command = [sys.executable, "-c", STOPPED, "convert", str(source), str(target), "--force"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "staged\n"
        process.send_signal(how)
        return process.wait(timeout=60)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends a process without telling it")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "terminate"])
def test_a_conversion_that_is_stopped_cleans_up(small: Path, out: Path, how: signal.Signals) -> None:
    """The old target stays, and what was half done is gone."""
    (out / "b.json").write_bytes(b"old")
    assert _stopped(small, out / "b.json", how) != 0
    assert [(path.name, path.read_bytes()) for path in out.iterdir()] == [("b.json", b"old")]


def test_a_conversion_that_is_killed_leaves_the_target_whole(cli: Cli, small: Path, out: Path) -> None:
    """What it leaves is hidden, and the next conversion to the target removes it."""
    (out / "b.json").write_bytes(b"old")
    assert _stopped(small, out / "b.json", signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL) != 0
    assert (out / "b.json").read_bytes() == b"old"
    assert [path.name for path in out.iterdir() if not path.name.startswith(".")] == ["b.json"]
    assert cli("convert", small, out / "b.json", "--force").code == 0
    assert sorted(path.name for path in out.iterdir()) == ["b.json", "b.safetensors"]


def test_a_source_that_does_not_run_is_said_to_be_it(cli: Cli, tmp_path: Path, out: Path) -> None:
    """Clip of integers exists from opset 12 on, though exporters write it before; raising the opset mends the model."""
    text = '<ir_version: 8, opset_import: ["": 11]> g (int64[2] x, int64 low) => (int64[2] y) { y = Clip (x, low) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "clip.onnx")
    outcome = cli("convert", tmp_path / "clip.onnx", out / "b.onnx", "--opset", "21")
    assert outcome.code == 4
    assert "the source itself does not run here" in outcome.err
    assert "--no-verify" in outcome.err
    assert cli("convert", tmp_path / "clip.onnx", out / "b.onnx", "--opset", "21", "--no-verify").code == 0
    assert [path.name for path in out.iterdir()] == ["b.onnx"]
