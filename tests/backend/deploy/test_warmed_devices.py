"""`open_package` of a warmed package: first results come from the compile cache, and nothing else differs."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_packages.packages import SIZE, X, assert_right, flip, make

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


def opened(path: Path, **settings: Any) -> PackageDevices:
    runner = rlx_ort.open_package(path, **settings)
    assert isinstance(runner, PackageDevices)
    return runner


def is_quick(runner: rlx_ort.GraphDevices) -> bool:
    return "started on" in repr(runner)


def answer(run: Callable[[], Any]) -> Any:
    """Return what a call gives: the outputs, or the type and text of the error."""
    try:
        return [output.tolist() for output in run()]
    except RlxError as err:
        return type(err), str(err)


WORK = {
    # stopped; CPython aborts if a daemon thread is writing its traceback as the interpreter goes down
    "runs": """
    runner, x = rlx_ort.open_package(path), np.ones((20000, SIZE), np.float32)
    while True:
        runner.run("cpu", {"x": x})
        begun.set()
""",
    # one after the other, as the thread that packs weights does
    "opens sessions": """
    x = np.ones((20, SIZE), np.float32)
    while True:
        with rlx_ort.open_package(path) as runner:
            runner.run("cpu", {"x": x})
            runner._quick._runs = 3  # the next run has the weights packed
            runner.run("cpu", {"x": x})
        begun.set()
""",
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_the_process_ends_well_while_a_daemon_thread_is_inside(warmed: Path, tmp_path: Path, work: str) -> None:
    """The interpreter waits for it as it goes down, and refuses what it asks for; the entry of the cache stays."""
    program = f"""
import contextlib, threading
import numpy as np
import rlx_ort
path, SIZE, begun = {str(warmed)!r}, {SIZE}, threading.Event()
def work():{work}
def quietly():
    with contextlib.suppress(rlx_ort.RlxError):
        work()
threading.Thread(target=quietly, daemon=True).start()
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
            print("process is exiting" in str(err))
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
        assert_right(runner.run("cpu", {"x": X})[0])
        assert Device.CPU in runner.devices()
        assert_right(runner.run("cpu", {"x": X})[0])
        assert runner.run_try(["cpu"], {"x": X})[0] == Device.CPU
        assert_right(runner.compile("cpu").run({"x": X})[0])


def test_a_closed_runner_compiles_anew(warmed: Path) -> None:
    """As every `GraphDevices`."""
    runner = opened(warmed)
    runner.run("cpu", {"x": X})
    runner.close()
    assert_right(runner.run("cpu", {"x": X})[0])
    runner.close()


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


@pytest.mark.parametrize(
    "settings", [{"private": True}, {"verify_on_first_use": True}, {"options": CompileOptions()}], ids=str
)
def test_whoever_asks_for_more_gets_the_graph(warmed: Path, settings: dict[str, Any]) -> None:
    """Private weights, golden cases and options of the caller are no part of what was warmed."""
    with opened(warmed, **settings) as runner:
        assert not is_quick(runner)
        assert_right(runner.run("cpu", {"x": X})[0])


def test_a_provider_of_the_user_s_own_is_asked(warmed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session from the cache is that of our provider for the CPU."""

    class Mine(CpuProvider):
        """Somebody's own."""

    mine = registry.ProviderRegistry((Mine(),))
    monkeypatch.setattr(registry.default_registry(), "_by_kind", mine._by_kind)
    with opened(warmed) as runner:
        assert not is_quick(runner)


def test_an_entry_that_vanishes_before_the_first_run_is_no_error(warmed: Path) -> None:
    """The package is opened in full, as it would have been without the entry."""
    with opened(warmed) as runner, watched() as openings:
        assert is_quick(runner)
        default_store().clear()
        assert_right(runner.run("cpu", {"x": X})[0])
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
