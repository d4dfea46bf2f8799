"""Calibration of real devices: it ends in time, can be read again, and predicts the device it measured."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rlx_ort import CalibrationProfile, Device, Graph, calibrate, cost_model, environment, explain
from rlx_ort.calibration import store


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a process that has measured nothing."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    store.forget()
    return tmp_path / "calibration"


def product(rows: int) -> Graph:
    """Return a product that is on no grid of the calibration."""
    graph = Graph("product")
    weight = graph.param("w", [300, 300], data=np.full((300, 300), 0.01, np.float32))
    graph.outputs = [graph.input("x", [rows, 300]) @ weight]
    return graph


def test_a_quick_calibration_of_the_cpu_is_kept_and_used() -> None:
    """Predictions come from the profile, here and after everything was forgotten."""
    profile = calibrate("cpu", quick=True)
    store.forget()
    assert store.find(Device.CPU).profile == profile
    estimate = explain(product(10), "cpu")
    assert estimate is not None
    assert estimate.source.startswith("quick calibration")


def test_a_calibration_names_what_it_measured() -> None:
    """Hardware, engine, unit, spread and repeats are in the file."""
    document = json.loads(calibrate("cpu", quick=True).to_json())
    assert document["unit"] == "ns"
    assert document["key"]["engine"].startswith("onnxruntime")
    assert document["key"]["hardware"]
    assert all(ns >= 0 and repeats >= 1 for _, _, ns, _, _, repeats in document["rows"])
    assert {"run", "launch", "MatMul", "Add"} <= {row[0] for row in document["rows"]}


def test_more_rows_are_predicted_to_take_longer() -> None:
    """Whatever was measured, a hundred times the work is not the same work."""
    calibrate("cpu", quick=True)
    few, many = (explain(product(rows), "cpu") for rows in (8, 800))
    assert few is not None
    assert many is not None
    assert few.total_ns < many.total_ns


def test_progress_is_told_from_beginning_to_end() -> None:
    """Shares grow from 0 to 1."""
    reports: list[tuple[str, float]] = []
    calibrate("cpu", quick=True, progress=lambda what, share: reports.append((what, share)))
    shares = [share for _, share in reports]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_a_clock_that_goes_back_does_not_spoil_a_profile() -> None:
    """Runs during which it jumped are left out; no time is negative or endless."""
    calls = 0

    def jumping() -> int:
        nonlocal calls
        calls += 1
        return time.perf_counter_ns() - (10_000_000 if calls % 13 == 0 else 0)

    profile = calibrate("cpu", quick=True, clock=jumping)
    assert all(0 <= row.ns < 1e9 for row in profile.rows if row.kernel in ("run", "MatMul", "Add"))


def test_without_a_calibration_the_default_is_used_and_nothing_is_measured(fresh: Path) -> None:
    """Choosing is no time to measure."""
    model = cost_model(Device.CPU)
    assert model is not None
    assert model.source.startswith("default")
    assert not fresh.exists()


def test_auto_calibration_measures_at_the_first_prediction() -> None:
    """With RLX_AUTO_CALIBRATE, the prediction comes from a profile."""
    from rlx_ort.selection import predict

    predict._tried.clear()
    with environment.override({"RLX_AUTO_CALIBRATE": "1"}):
        model = cost_model(Device.CPU)
    assert model is not None
    assert model.source.startswith("calibration")


def test_two_processes_that_calibrate_at_once_leave_one_whole_profile(fresh: Path) -> None:
    """The second waits for the first and takes over its profile."""
    program = (
        "from rlx_ort.selection.predict import calibrate\n"
        "profile = calibrate('cpu', quick=True)\n"
        "print(profile.measured, profile.elapsed_s)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, encoding="utf-8")
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=60)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert all(answers)
    [file] = fresh.glob("*.json")
    kept = CalibrationProfile.from_json(file.read_text(encoding="utf-8"))
    assert f"{kept.measured} {kept.elapsed_s}" in answers


@pytest.mark.webgpu
@pytest.mark.slow
def test_a_gpu_in_software_is_predicted_to_be_slower_than_the_cpu() -> None:
    """Its calibration gives enough rows to predict a product."""
    calibrate("webgpu", quick=True)
    calibrate("cpu", quick=True)
    on_gpu, on_cpu = (explain(product(64), device) for device in ("webgpu", "cpu"))
    assert on_gpu is not None
    assert on_cpu is not None
    assert on_gpu.total_ns > on_cpu.total_ns
