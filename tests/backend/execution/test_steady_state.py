"""The steady state of every way to run: a lookup of the route and the session's run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import rlx_ort
from rlx_ort import Device, DevicePolicy, Graph, GraphDevices, NoViableDeviceError, Resilience, environment

MOST_CALLS = 8
FOLDER = str(Path(rlx_ort.__file__).resolve().parents[1])
INPUTS = {"x": np.arange(4, dtype=np.float32), "y": np.full(4, 2, np.float32)}
WANTED = np.array([2, 3, 4, 5], np.float64)
Way = Callable[[GraphDevices], Any]
WAYS: dict[str, Way] = {
    "run_fastest": lambda runner: runner.run_fastest(INPUTS),
    "run_resolved": lambda runner: runner.run_resolved(INPUTS),
    "run_resolved, named": lambda runner: runner.run_resolved(INPUTS, "cpu"),
    "call": lambda runner: runner(**INPUTS),
    "run": lambda runner: runner.run("cpu", INPUTS),
    "run, a Device": lambda runner: runner.run(Device.CPU, INPUTS),
    "run_chosen": lambda runner: runner.run_chosen(INPUTS)[1],
    "run_chain": lambda runner: runner.run_chain(INPUTS)[1],
    "run_try": lambda runner: runner.run_try(["cpu"], INPUTS)[1],
}


def added() -> Graph:
    """Return `x + y` of 4 floats."""
    graph = Graph("added")
    graph.outputs = [graph.input("x", [4]) + graph.input("y", [4])]
    return graph


KINDS = {"plain": None, "resilient": Resilience()}


@pytest.fixture(params=KINDS)
def runner(request: pytest.FixtureRequest) -> GraphDevices:
    """Return a runner on the CPU."""
    return GraphDevices(added(), DevicePolicy.only("cpu"), resilience=KINDS[request.param])


def calls(run: Callable[[], Any]) -> Counter[str]:
    """Return how often each function of the package is called in the steady state of a run."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER) and frame.f_code.co_filename != __file__:
            found[frame.f_code.co_qualname] += 1

    for _ in range(8):
        run()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, int]]:
    """Return the calls of each way, by kind of runner and way, in a process where no run has had a time limit yet."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
    counts: dict[str, dict[str, int]] = json.loads(done.stdout)
    return counts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_a_lookup_and_the_session(way: str, kind: str, counted: dict[str, dict[str, int]]) -> None:
    """At most eight functions of the package are called."""
    more = 3 if way == "run_try" and kind == "resilient" else 0  # a chain and its device are looked up
    found = counted[f"{kind} {way}"]
    assert 0 < sum(found.values()) <= MOST_CALLS + more, found


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_in_its_steady_state(way: str, runner: GraphDevices) -> None:
    """The route that is looked up is the right one."""
    for _ in range(3):
        np.testing.assert_array_equal(WAYS[way](runner)[0], WANTED)


def test_an_adaptive_run_adds_what_it_learns(runner: GraphDevices) -> None:
    """The choice is looked up as well; the time of the run is noted."""
    runner.set_policy(DevicePolicy.only("cpu").with_adaptive_pick())
    found = calls(lambda: runner.run_chosen(INPUTS))
    assert {"RouteTable.find", "Follower.note"} <= found.keys()
    assert not {"DeviceSessions.pick", "Candidates.__init__"} & found.keys()


@pytest.mark.parametrize("change", ["override", "environment"])
def test_a_variable_that_changes_counts_at_once(
    change: str, runner: GraphDevices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`RLX_DEVICE` set from code or in the process environment after runs: the device is asked for, and skipped."""
    for _ in range(3):
        runner.run_resolved(INPUTS)
    if change == "override":
        environment.set_override("DEVICE", "tpu")
    else:
        monkeypatch.setenv("RLX_DEVICE", "tpu")
    try:
        np.testing.assert_array_equal(runner.run_resolved(INPUTS)[0], WANTED)
    finally:
        environment.unset_override("DEVICE")
    assert "RLX_DEVICE asks for TPU" in caplog.text


def test_a_chain_that_is_set_after_runs_is_followed(runner: GraphDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices before the one that works are attempts of the run."""
    for _ in range(3):
        runner.run_chain(INPUTS)
    monkeypatch.setenv("RLX_DEVICE_CHAIN", "tpu,cpu")
    np.testing.assert_array_equal(runner.run_chain(INPUTS)[1][0], WANTED)
    assert [device.label for device, _ in runner.last_attempts] == ["tpu"]


def test_a_new_policy_counts_at_once_for_named_devices(runner: GraphDevices) -> None:
    """A device that it denies runs no more, though it ran a moment ago."""
    for _ in range(3):
        runner.run("cpu", INPUTS)
    runner.set_policy(DevicePolicy().with_deny("cpu"))
    with pytest.raises(NoViableDeviceError, match="denied"):
        runner.run("cpu", INPUTS)


def test_new_parameters_and_a_grown_graph_count_at_once() -> None:
    """Also between two runs on the same route."""
    graph = added()
    weight = graph.param("w", [4], data=np.zeros(4, np.float32))
    graph.outputs = [graph.outputs[0] + weight]
    runner = GraphDevices(graph, DevicePolicy.only("cpu"))
    for way in (WAYS["run_fastest"], WAYS["run"]):
        for _ in range(3):
            way(runner)
        for value in (1, 2):
            runner.set_param("w", np.full(4, value, np.float32))
            np.testing.assert_array_equal(way(runner)[0], WANTED + value)
        runner.set_param("w", np.zeros(4, np.float32))
    graph.outputs = [graph.outputs[0] * 2.0]
    np.testing.assert_array_equal(runner.run_fastest(INPUTS)[0], 2 * WANTED)


if __name__ == "__main__":
    runners = {kind: GraphDevices(added(), DevicePolicy.only("cpu"), resilience=KINDS[kind]) for kind in KINDS}
    counts = {f"{kind} {way}": calls(partial(WAYS[way], runners[kind])) for kind in KINDS for way in WAYS}
    sys.stdout.write(json.dumps(counts))
