"""`open_package` of a warmed package: first results come from the compile cache, and nothing else differs."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_packages.packages import SIZE, X, flip, make, reference

import rlx_ort
from rlx_ort import CompileOptions, Device, DevicePolicy, IntegrityError, NoViableDeviceError, RlxError
from rlx_ort.deploy import package as package_module
from rlx_ort.deploy.open import PackageDevices, warm_package
from rlx_ort.providers import registry
from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.engine import process
from rlx_ort.providers.engine.compiled import starts
from rlx_ort.providers.engine.compiled.models import watched
from rlx_ort.providers.engine.compiled.store import default_store
from rlx_ort.providers.engine.process import ThreadBudget


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(params=[False, True], ids=["file", "folder"])
def warmed(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a package that was warmed for the CPU."""
    path = make(tmp_path / "small.ortpackage", folder=request.param)
    (row,) = warm_package(path, [Device.CPU])
    assert row.starts
    return path


def opened(path: Path, **settings: Any) -> PackageDevices:
    runner = rlx_ort.open_package(path, **settings)
    assert isinstance(runner, PackageDevices)
    return runner


def is_quick(runner: rlx_ort.GraphDevices) -> bool:
    return "started on" in repr(runner)


def close_to(result: Any, x: np.ndarray = X) -> None:
    np.testing.assert_allclose(result, reference(x), rtol=1e-3, atol=1e-3)


def answer(run: Callable[[], Any]) -> Any:
    """Return what a call gives: the outputs, or the type and text of the error."""
    try:
        return [output.tolist() for output in run()]
    except RlxError as err:
        return type(err), str(err)


def test_a_warmed_package_runs_without_its_graph(warmed: Path) -> None:
    """The results are right before and after the weights are packed, whoever names the CPU."""
    with opened(warmed) as runner:
        for number in range(8):
            close_to((runner.run("cpu", {"x": X}) if number % 2 else runner.run_resolved({"x": X}, Device.CPU))[0])
        assert runner._quick is not None
        runner._quick.settle()
        close_to(runner.run("cpu", {"x": X})[0])
        assert is_quick(runner)


def test_the_first_result_needs_no_graph_and_no_onnx(warmed: Path, tmp_path: Path) -> None:
    """A process that opens a warmed package and runs it imports neither ONNX nor the IR, nor the cost models."""
    np.save(tmp_path / "x.npy", X)
    program = f"""
import json, sys
import numpy as np
import rlx_ort
runner = rlx_ort.open_package({str(warmed)!r})
result = runner.run("cpu", {{"x": np.load({str(tmp_path / "x.npy")!r})}})[0]
heavy = {{"onnx", "rlx_ort.ir.graph", "rlx_ort.adaptive", "rlx_ort.execution.compiled", "psutil"}}
print(json.dumps([sorted(heavy.intersection(sys.modules)), float(result.sum())]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    heavy, total = json.loads(done.stdout)
    assert heavy == []
    assert total == pytest.approx(reference(X).sum(), rel=1e-3)


def test_the_process_ends_well_while_a_thread_runs(warmed: Path, tmp_path: Path) -> None:
    """A run in a daemon thread does not abort the interpreter as it goes down."""
    program = f"""
import threading
import numpy as np
import rlx_ort
runner = rlx_ort.open_package({str(warmed)!r})
x = np.ones((20000, {SIZE}), np.float32)
begun = threading.Event()
def work():
    try:
        while True:
            runner.run("cpu", {{"x": x}})
            begun.set()
    except rlx_ort.RlxError:
        pass  # stopped; CPython aborts if a daemon thread is writing its traceback as the interpreter goes down
threading.Thread(target=work, daemon=True).start()
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_process_ends_well_while_a_thread_opens_sessions(warmed: Path, tmp_path: Path) -> None:
    """A daemon thread that opens one after the other, as the one that packs weights does, is waited for and refused."""
    program = f"""
import threading
import numpy as np
import rlx_ort
from rlx_ort.providers.engine.compiled.store import default_store
x = np.ones((20, {SIZE}), np.float32)
begun = threading.Event()
def work():
    try:
        while True:
            with rlx_ort.open_package({str(warmed)!r}) as runner:
                runner.run("cpu", {{"x": x}})
                runner._quick._runs = 3  # the next run has the weights packed
                runner.run("cpu", {{"x": x}})
            begun.set()
    except rlx_ort.EngineError:
        pass
threading.Thread(target=work, daemon=True).start()
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(default_store().entries()) == 1


def test_no_session_is_opened_once_the_process_ends(warmed: Path, tmp_path: Path) -> None:
    """Whoever asks for one gets an error, and the entry of the cache, which is right, stays."""
    program = f"""
import atexit
import numpy as np
import rlx_ort
x = np.ones((20, {SIZE}), np.float32)
def late():
    for options in (None, rlx_ort.CompileOptions()):
        try:
            rlx_ort.open_package({str(warmed)!r}, options=options).run("cpu", {{"x": x}})
        except rlx_ort.RlxError as err:
            print("process ends" in str(err))
atexit.register(late)  # called after those that are registered later
rlx_ort.open_package({str(warmed)!r}).run("cpu", {{"x": x}})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout.split() == ["True", "True"], done.stdout + done.stderr
    assert len(default_store().entries()) == 1


def test_a_parameter_that_is_set_reaches_the_next_run(warmed: Path) -> None:
    """The session from the cache has the old one, and is given up."""
    with opened(warmed) as runner:
        runner.run("cpu", {"x": X})
        runner.set_param("first", np.zeros((SIZE, SIZE), np.float32))
        assert not runner.run("cpu", {"x": X})[0].any()


def test_a_graph_that_grows_is_compiled_anew(warmed: Path) -> None:
    """Whoever gets the graph may change it, so from then on it counts."""
    with opened(warmed) as runner:
        before = runner.run("cpu", {"x": X})[0]
        graph = runner.graph
        assert not is_quick(runner)
        graph.outputs = [graph.neg(graph.outputs[0])]
        np.testing.assert_allclose(runner.run("cpu", {"x": X})[0], -before, rtol=1e-3, atol=1e-3)


def test_reports_compiled_graphs_and_chains_are_those_of_any_package(warmed: Path) -> None:
    """They read the graph, and runs go on being right."""
    with opened(warmed) as runner:
        close_to(runner.run("cpu", {"x": X})[0])
        assert Device.CPU in runner.devices()
        close_to(runner.run("cpu", {"x": X})[0])
        assert runner.run_try(["cpu"], {"x": X})[0] == Device.CPU
        close_to(runner.compile("cpu").run({"x": X})[0])


def test_a_closed_runner_compiles_anew(warmed: Path) -> None:
    """As every `GraphDevices`."""
    runner = opened(warmed)
    runner.run("cpu", {"x": X})
    runner.close()
    close_to(runner.run("cpu", {"x": X})[0])
    runner.close()


@pytest.mark.parametrize(
    "inputs",
    [{}, {"y": X}, {"x": X[0]}, {"x": X[:, :-1]}, {"x": X.astype(np.float64)}, {"x": X.tolist()}],
    ids=["none", "another", "rank", "size", "wider", "list"],
)
def test_inputs_that_do_not_fit_get_the_graph_s_own_answer(warmed: Path, inputs: dict[str, Any]) -> None:
    """The quick way takes exact arrays only; all else is refused or converted as everywhere."""
    with opened(warmed) as quick, opened(warmed, options=CompileOptions()) as full:
        assert is_quick(quick)
        assert not is_quick(full)
        assert answer(lambda: quick.run("cpu", inputs)) == answer(lambda: full.run("cpu", inputs))


def test_the_policy_refuses_the_cpu_in_the_same_words(warmed: Path) -> None:
    """A warmed package gives no way around the policy, its own, the caller's or a later one."""
    denied = DevicePolicy().with_deny(["cpu"])
    with opened(warmed, policy=denied) as quick, opened(warmed, policy=denied, options=CompileOptions()) as full:
        assert answer(lambda: quick.run("cpu", {"x": X})) == answer(lambda: full.run("cpu", {"x": X}))
    with opened(warmed) as runner:
        runner.run("cpu", {"x": X})
        runner.set_policy(denied)
        with pytest.raises(NoViableDeviceError):
            runner.run("cpu", {"x": X})


@pytest.mark.parametrize("eager_bytes", [4 << 20, 0], ids=["hashed at opening", "large"])
def test_a_changed_graph_is_refused_though_the_cache_could_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager_bytes: int
) -> None:
    """Opening promises a package that is what it was, of whatever size its graph file is."""
    path = make(tmp_path / "a.ortpackage", folder=True)
    warm_package(path, [Device.CPU])
    monkeypatch.setattr(package_module, "_EAGER_BYTES", eager_bytes)
    with opened(path) as runner:
        assert is_quick(runner)
        name = runner._package.index.graph
    flip(path / name, 50, 1)
    with pytest.raises(IntegrityError, match=Path(name).name):
        opened(path)


def test_a_signature_that_is_asked_for_is_looked_at(warmed: Path, tmp_path: Path) -> None:
    """The cache does not stand in for it."""
    (tmp_path / "key.pem").write_text("no key", encoding="ascii")
    with pytest.raises(rlx_ort.PackageError):
        opened(warmed, require_signature=tmp_path / "key.pem")


@pytest.mark.parametrize("variable", ["RLX_CACHE=off", "RLX_KERNEL_DISPATCH=common", "RLX_DISPATCH_REPORT=1"])
def test_variables_that_change_the_session_count(warmed: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """What was warmed was warmed without them."""
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    with opened(warmed) as runner:
        assert not is_quick(runner)
        close_to(runner.run("cpu", {"x": X})[0])


@pytest.mark.parametrize(
    "settings", [{"private": True}, {"verify_on_first_use": True}, {"options": CompileOptions()}], ids=str
)
def test_whoever_asks_for_more_gets_the_graph(warmed: Path, settings: dict[str, Any]) -> None:
    """Private weights, golden cases and options of the caller are no part of what was warmed."""
    with opened(warmed, **settings) as runner:
        assert not is_quick(runner)
        close_to(runner.run("cpu", {"x": X})[0])


def test_a_provider_of_the_user_s_own_is_asked(warmed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session from the cache is that of our provider for the CPU."""

    class Mine(CpuProvider):
        """Somebody's own."""

    mine = registry.ProviderRegistry((Mine(),))
    monkeypatch.setattr(registry.default_registry(), "_by_kind", mine._by_kind)
    with opened(warmed) as runner:
        assert not is_quick(runner)


def test_a_newer_installation_does_not_start_from_what_an_older_one_wrote(
    warmed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write another model for the same graph."""
    monkeypatch.setattr("rlx_ort.providers.engine.compiled.starts._installation", lambda: "newer")
    with opened(warmed) as runner:
        assert not is_quick(runner)


def test_an_entry_that_vanishes_before_the_first_run_is_no_error(warmed: Path) -> None:
    """The package is opened in full, as it would have been without the entry."""
    with opened(warmed) as runner, watched() as openings:
        assert is_quick(runner)
        default_store().clear()
        close_to(runner.run("cpu", {"x": X})[0])
        assert not is_quick(runner)
    assert openings == []


def test_the_session_takes_its_threads_from_the_budget_and_gives_them_back(
    warmed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`RLX_WORKERS` counts and not the threads of the warm-up; packing the weights takes none in addition."""
    monkeypatch.setenv("RLX_WORKERS", "3")
    fresh = ThreadBudget()
    monkeypatch.setattr(process, "_budget", fresh)
    monkeypatch.setattr(starts, "budget", process.budget)
    with opened(warmed) as runner:
        assert fresh.granted == 0
        for _ in range(5):
            runner.run("cpu", {"x": X})
            assert fresh.granted == 2
        assert runner._quick is not None
        runner._quick.settle()
        assert fresh.granted == 2
        runner.devices()
        assert fresh.granted == 0


def test_a_runner_that_is_let_go_gives_its_threads_back(warmed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget keeps no session alive."""
    monkeypatch.setenv("RLX_WORKERS", "3")
    fresh = ThreadBudget()
    monkeypatch.setattr(starts, "budget", lambda: fresh)
    runner = opened(warmed)
    runner.run("cpu", {"x": X})
    assert fresh.granted == 2
    del runner
    gc.collect()
    assert fresh.granted == 0
