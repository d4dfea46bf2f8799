"""Calibrations, conversions and the verification of packages end when they are stopped, and leave nothing half done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_provider import until
from sample_packages.packages import make

from rlx_ort import CancelledRunError, CancelToken, Device, Graph, TimeLimitError, calibrate, limited, save_onnx
from rlx_ort.calibration import store
from rlx_ort.conversion.convert import ConvertOptions, convert
from rlx_ort.deploy.golden import check_device
from rlx_ort.deploy.open import runner_of
from rlx_ort.deploy.package import Package
from rlx_ort.providers.registry import default_registry


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))


def stopped(work: Callable[[CancelToken], object]) -> None:
    """Do work that cancels its own token; no thread stays."""
    token, before = CancelToken(), threading.active_count()
    with pytest.raises(CancelledRunError, match=r"cancelled$"):
        limited(lambda: work(token), cancel=token, grace_s=30.0)
    until(lambda: threading.active_count() <= before + 1)  # the worker, which waits for the next call


def test_a_calibration_ends_at_its_limit() -> None:
    """No profile is kept of what was measured by then."""
    begun = time.perf_counter()
    with pytest.raises(TimeLimitError, match=r"and was stopped$"):
        limited(lambda: calibrate("cpu"), timeout_s=0.5, grace_s=30.0)
    assert time.perf_counter() - begun < 7.0
    assert store.find(Device.CPU).profile is None


def test_a_probe_that_is_stopped_is_not_recorded() -> None:
    """The device is asked again."""
    default_registry().forget()

    def work(token: CancelToken) -> None:
        token.cancel()
        until(_stopped)
        default_registry().availability(Device.CPU)

    stopped(work)
    assert default_registry().availability(Device.CPU).available


def _stopped() -> bool:
    from rlx_ort.providers.engine.stopping import held_stop

    stop = held_stop()
    return stop is not None and stop.stopped


def test_a_conversion_ends_at_its_next_step(tmp_path: Path) -> None:
    """The target is as before."""
    graph = Graph("small")
    graph.outputs = [graph.input("x", [4, 4]) @ graph.param("w", [4, 4], data=np.eye(4, dtype=np.float32))]
    save_onnx(graph, tmp_path / "small.onnx")

    def work(token: CancelToken) -> None:
        def step(text: str) -> None:
            if text.startswith("writing"):
                token.cancel()
                until(_stopped)

        convert(tmp_path / "small.onnx", tmp_path / "out.onnx", ConvertOptions(simplify=True), on_step=step)

    stopped(work)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["small.onnx"]


def test_the_verification_of_a_package_ends_within_a_file(tmp_path: Path) -> None:
    """Its own threads end as well, and the package can be verified afterwards."""
    with Package(make(tmp_path / "small.ortpackage")) as package:

        def work(token: CancelToken) -> None:
            def progress(count: int) -> None:
                token.cancel()
                until(_stopped)

            package.check_all(progress)

        stopped(work)
        package.check_all()


def test_golden_cases_that_are_stopped_say_nothing_of_the_device(tmp_path: Path) -> None:
    """The device is not wrong."""
    with Package(make(tmp_path / "small.ortpackage")) as package:
        runner: Any = runner_of(package)

        def work(token: CancelToken) -> None:
            runner.compile("cpu")
            token.cancel()
            until(_stopped)
            check_device(package, runner, Device.CPU)

        stopped(work)
        assert check_device(package, runner, Device.CPU).ok
