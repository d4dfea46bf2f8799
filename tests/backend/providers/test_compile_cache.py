"""Sessions through the compile cache on real providers: the same results, made once, and never a wrong answer."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rlx_ort.errors import EngineError, LegalizeError
from rlx_ort.options.compile_options import CacheUse, OptimizationLevel, WeightSharing
from rlx_ort.providers.engine.compiled import models
from rlx_ort.providers.engine.compiled.models import watched
from rlx_ort.providers.engine.compiled.store import MODEL_FILE, default_store

HERE = Path(__file__).parent
KILLS = int(os.environ.get("RLX_KILL_COUNT", "6"))
MATMUL = """(float[rows,64] x) => (float[rows,32] y)
    { t = Transpose<perm=[1,0]>(W) z = MatMul(x, t) s = Add(z, b) y = Relu(s) }"""
CONV = "(float[1,3,8,8] x) => (float[1,8,6,6] y) { c = Conv(x, W) y = Relu(c) }"


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", [3, 30, 33, 90, 250, 494, 513])
def test_packed_weights_of_any_size_are_read_back(open_model, tmp_path: Path, monkeypatch, width: int):
    """ONNX Runtime saves packed weights under 1 MiB misaligned, and reading those would end the process."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    text = f"(float[8,{width}] x) => (float[8,{width}] y) {{ h = MatMul(x, V) t = Tanh(h) y = MatMul(t, W) }}"
    weights, x = {"V": random(width, width), "W": random(width, width)}, random(8, width)
    (wanted,) = open_model(text, weights).run(["y"], {"x": x})
    for _ in range(2):
        with watched() as found:
            (got,) = open_model(text, weights, cache=CacheUse.ON).run(["y"], {"x": x})
        assert len(found) == 1
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def forget_warnings():
    """Forget which folders were warned of, as each test has its own."""
    models._warned.clear()


@pytest.fixture
def made(open_model):
    """Return the entries in the cache."""
    return lambda: default_store().entries()


def wanted(x, weight, bias):
    return np.maximum(x.astype(np.float64) @ weight.T.astype(np.float64) + bias, 0)


@pytest.mark.parametrize("sharing", list(WeightSharing))
def test_the_second_session_opens_what_the_first_one_left(open_model, made, device, sharing):
    """Both give the float64 result, and the entry is made once."""
    x, weight, bias = random(3, 64), random(32, 64), random(32)
    for _ in range(2):
        with watched() as openings:
            session = open_model(MATMUL, {"W": weight, "b": bias}, device.label, sharing=sharing, cache=CacheUse.ON)
        np.testing.assert_allclose(session.run(["y"], {"x": x})[0], wanted(x, weight, bias), rtol=1e-3, atol=1e-3)
        assert {node.provider for node in session.assignments} == {openings[0].recipe.ep_name}
        assert [entry.digest for entry in made()] == [openings[0].entry.digest]


def test_a_convolution_survives_the_layout_of_its_provider(open_model, device):
    """The CPU's blocked layout and WebGPU's channels-last operators are read back by who wrote them."""
    weight, x = random(8, 3, 3, 3), random(1, 3, 8, 8)
    plain = open_model(CONV, {"W": weight}).run(["y"], {"x": x})[0]
    for _ in range(2):
        session = open_model(CONV, {"W": weight}, device.label, cache=CacheUse.ON)
        np.testing.assert_allclose(session.run(["y"], {"x": x})[0], plain, rtol=1e-3, atol=1e-4)


@pytest.mark.webgpu
def test_providers_do_not_share_an_entry(open_model, made):
    """A model that one provider optimised has operators that the other does not know."""
    for label in ("cpu", "webgpu"):
        open_model(CONV, {"W": random(8, 3, 3, 3)}, label, cache=CacheUse.ON)
    assert {entry.parts["provider"] for entry in made()} == {"CPUExecutionProvider", "WebGpuExecutionProvider"}


def test_what_changes_a_model_changes_its_entry(open_model, made):
    """Weights, level, config and the model itself; a number of threads or a profile does not."""
    weight, bias = random(32, 64), random(32)
    same = {"cache": CacheUse.ON}
    open_model(MATMUL, {"W": weight, "b": bias}, **same)
    open_model(MATMUL, {"W": weight, "b": bias}, intra_op_threads=1, spinning=False, **same)
    open_model(MATMUL, {"W": weight, "b": bias}, sharing=WeightSharing.RAW, **same)
    assert len(made()) == 1
    open_model(MATMUL, {"W": weight * 2, "b": bias}, **same)
    open_model(MATMUL, {"W": weight, "b": bias}, optimization=OptimizationLevel.BASIC, **same)
    open_model(MATMUL, {"W": weight, "b": bias}, session_config={"session.set_denormal_as_zero": "1"}, **same)
    open_model(MATMUL.replace("Relu", "Tanh"), {"W": weight, "b": bias}, **same)
    assert len(made()) == 5


def test_a_plain_session_writes_nothing(open_model, made, tmp_path):
    """No file of the size of a model appears unless somebody asked for it."""
    open_model(MATMUL, {"W": random(32, 64), "b": random(32)})
    open_model(MATMUL, {"W": random(32, 64), "b": random(32)}, cache=CacheUse.FOUND)
    assert made() == []
    assert not (tmp_path / "cache" / "compiled" / "locks").exists()


def test_found_uses_what_is_there(open_model):
    """`FOUND` opens an entry that `ON` made."""
    weights = {"W": random(32, 64), "b": random(32)}
    open_model(MATMUL, weights, cache=CacheUse.ON)
    with watched() as openings:
        open_model(MATMUL, weights, cache=CacheUse.FOUND)
    assert len(openings) == 1


@pytest.mark.parametrize("file", [MODEL_FILE, "weights.bin"])
def test_a_corrupt_entry_is_dropped_and_made_again(open_model, made, file, caplog):
    """A flipped bit never reaches a result."""
    x, weight, bias = random(3, 64), random(32, 64), random(32)
    open_model(MATMUL, {"W": weight, "b": bias}, cache=CacheUse.ON)
    path = made()[0].folder / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()  # a session may map it
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "rlx_ort.cache"):
        session = open_model(MATMUL, {"W": weight, "b": bias}, cache=CacheUse.ON)
    assert f"{file} was changed" in caplog.text
    np.testing.assert_allclose(session.run(["y"], {"x": x})[0], wanted(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert [entry.problem(whole=True) for entry in made()] == [""]


def test_an_entry_that_the_engine_refuses_is_made_again(open_model, made):
    """The digests are right, but the file is no model any more, as after a downgrade in place."""
    from rlx_ort.providers.engine.compiled.store import describe_files

    x, weight, bias = random(3, 64), random(32, 64), random(32)
    open_model(MATMUL, {"W": weight, "b": bias}, cache=CacheUse.ON)
    entry = made()[0]
    (entry.folder / MODEL_FILE).write_bytes(b"no model")
    (entry.folder / "entry.json").unlink()
    entry._replace(created_s=1.0, files=describe_files(entry.folder)).write_manifest()
    session = open_model(MATMUL, {"W": weight, "b": bias}, cache=CacheUse.ON)
    np.testing.assert_allclose(session.run(["y"], {"x": x})[0], wanted(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert made()[0].created_s > 1.0


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="a file in the way of the folder stands for all systems")
def test_a_cache_folder_that_cannot_be_made_costs_one_warning(open_model, monkeypatch, tmp_path, caplog):
    """Sessions open without the cache, also those that ask for packed weights."""
    x, weight, bias = random(3, 64), random(32, 64), random(32)
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "rlx_ort.cache"):
        for sharing in (WeightSharing.PREPACKED, WeightSharing.PRIVATE, WeightSharing.RAW):
            session = open_model(MATMUL, {"W": weight, "b": bias}, sharing=sharing, cache=CacheUse.ON)
            np.testing.assert_allclose(session.run(["y"], {"x": x})[0], wanted(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert len(caplog.records) == 1
    assert "opened without the compile cache" in caplog.text


def test_a_rename_that_windows_refuses_costs_the_entry_and_not_the_session(open_model, made, monkeypatch):
    """The session opens, and nothing is left behind."""
    from rlx_ort.providers.engine.compiled import store

    def refusing(source, target):
        raise PermissionError(13, "in use")

    monkeypatch.setattr(store.os, "replace", refusing)
    monkeypatch.setattr(store.time, "sleep", lambda seconds: None)
    x, weight, bias = random(3, 64), random(32, 64), random(32)
    session = open_model(MATMUL, {"W": weight, "b": bias}, cache=CacheUse.ON)
    np.testing.assert_allclose(session.run(["y"], {"x": x})[0], wanted(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert made() == []


def test_a_model_the_engine_refuses_is_an_error_with_the_cache_too(open_model, made):
    """The cache hides no failure, and keeps nothing of it."""
    with pytest.raises((EngineError, LegalizeError)):
        open_model("(float[2] x) => (float[2] y) { y = com.example.Nothing(x) }", cache=CacheUse.ON)
    assert made() == []


FULL = """
import resource, signal, sys
import numpy as np
from conftest import open_text
from rlx_ort.options.compile_options import CacheUse
from rlx_ort.providers.engine.compiled.store import default_store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
weight = np.eye(256, dtype=np.float32)
session = open_text("(float[1,256] x) => (float[1,256] y) { y = MatMul(x, W) }", {"W": weight}, cache=CacheUse.ON)
x = np.arange(256, dtype=np.float32)[None]
assert (session.run(["y"], {"x": x})[0] == x).all()
assert default_store().entries() == []
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the limit on the size of files is POSIX's")
def test_a_full_disk_costs_the_entry_and_not_the_session(python, tmp_path):
    """A file that cannot grow is what a full disk looks like; half a file is never opened."""
    done = python(FULL, RLX_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("opened without the compile cache") == 1


WORKER = """
import json, sys
import numpy as np
from conftest import open_text
from rlx_ort.options.compile_options import CacheUse
number = int(sys.stdin.readline()) if len(sys.argv) < 2 else int(sys.argv[1])
weight = np.full((300, 300), number, np.float32)
text = "(float[1,300] x) => (float[1,300] y) { y = MatMul(x, W) }"
session = open_text(text, {"W": weight}, cache=CacheUse.ON)
result = session.run(["y"], {"x": np.ones((1, 300), np.float32)})[0]
print(json.dumps(bool((result == 300 * number).all())), flush=True)
"""


def _start(tmp_path: Path, *, limit: str = "1G") -> subprocess.Popen[str]:
    paths = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, "RLX_CACHE_DIR": str(tmp_path / "cache"), "RLX_CACHE_LIMIT": limit}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", WORKER],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_two_processes_at_once_make_one_entry(tmp_path, monkeypatch):
    """The second waits for the first, and both are right."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    workers = [_start(tmp_path) for _ in range(2)]
    answers = [worker.communicate("1\n", timeout=120)[0] for worker in workers]
    assert [json.loads(answer) for answer in answers] == [True, True]
    assert len(default_store().entries()) == 1


def kill_at_random(tmp_path: Path, rounds: int, seed: int) -> tuple[int, int]:
    """Kill processes that fill and evict a cache, check it after each, and return how many died and how many ended.

    The limit is below two entries, so that each process that makes one also evicts one.
    """
    source = np.random.default_rng(seed)
    store = default_store()
    killed = ended = 0
    while killed < rounds:
        worker = _start(tmp_path, limit="1M")
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(f"{source.integers(4)}\n")
        worker.stdin.flush()
        before = {path.name for path in store.root.glob("*")} if store.root.exists() else set()
        until = time.monotonic() + 60
        # the moment is counted from the first change of the folder, when the process begins to write
        while worker.poll() is None and time.monotonic() < until:
            if store.root.exists() and {path.name for path in store.root.glob("*")} != before:
                break
            time.sleep(0.001)
        time.sleep(float(source.random()) * 0.05)
        worker.send_signal(signal.SIGKILL)
        answer = worker.communicate(timeout=60)[0]
        killed, ended = killed + (worker.returncode < 0), ended + (worker.returncode == 0)
        assert not answer or json.loads(answer) is True
        for entry in store.entries():
            assert entry.problem(whole=True) == ""
    return killed, ended


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX's")
def test_processes_killed_at_random_leave_a_cache_that_is_whole(tmp_path, monkeypatch):
    """No half entry is ever found, and the next process cleans up and is right; `RLX_KILL_COUNT=100` kills more."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    kill_at_random(tmp_path, KILLS, seed=1)
    worker = _start(tmp_path)
    assert json.loads(worker.communicate("7\n", timeout=120)[0]) is True
    leftovers = [path.name for path in default_store().root.glob("*-*")]
    assert leftovers == []
