"""Runs beside threads that close the sessions and change policy and weights, and a device that comes back wrong."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fault_provider import LOST, FaultProvider, until

from rlx_ort import Device, DevicePolicy, Graph, GraphDevices, HealthState, Resilience

SECONDS = 2.5
POLICIES = [
    DevicePolicy.only(["cpu", "webgpu"]),
    DevicePolicy.only(["webgpu", "cpu"]).with_prefer(["cpu"]),
]


def scaled() -> Graph:
    """Return a graph whose two outputs must be of one version of its weight."""
    graph = Graph("scaled")
    x, w = graph.input("x", ["n"]), graph.param("w", [1], data=np.zeros(1, np.float32))
    graph.outputs = [x * w, x + w]
    return graph


class Weights:
    """Gives the weight 1, 2, 3, and knows which values a run may have seen."""

    def __init__(self, runner: GraphDevices) -> None:
        self.runner = runner
        self.begun = self.done = 0

    def set_next(self) -> None:
        """Set the next value."""
        self.begun += 1
        self.runner.set_param("w", np.array([self.begun], np.float32))
        self.done = self.begun


def stress(runner: GraphDevices, changes: list[Callable[[], object]]) -> Counter[str]:
    """Run in every way from four threads beside the changes, each in a thread; return what went wrong, counted."""
    weights, wrong, until_s = Weights(runner), Counter[str](), time.monotonic() + SECONDS
    ways: list[Callable[[dict[str, Any]], Any]] = [
        runner.run_fastest,
        runner.run_resolved,
        lambda inputs: runner.run_chosen(inputs)[1],
        lambda inputs: runner.run("cpu", inputs),
    ]

    def run(seed: int) -> None:
        order = random.Random(seed)
        while time.monotonic() < until_s:
            x = np.arange(1, order.choice((2, 5, 65)), dtype=np.float32)
            oldest = weights.done
            try:
                product, total = order.choice(ways)({"x": x})
            except Exception as err:  # counted
                wrong[repr(err)] += 1
                continue
            weight = product[0]
            if not (
                oldest <= weight <= weights.begun and (product == x * weight).all() and (total == x + weight).all()
            ):
                wrong[f"{weight} of {oldest} to {weights.begun}: {product[:3]}, {total[:3]}"] += 1

    def change(call: Callable[[], object]) -> None:
        while time.monotonic() < until_s:
            call()

    def new_weights() -> None:
        weights.set_next()
        time.sleep(0.2 if weights.begun % 20 == 0 else 0.002)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    threads += [threading.Thread(target=change, args=(call,)) for call in (new_weights, *changes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    return wrong


def forgetting(runner: GraphDevices, policies: list[DevicePolicy]) -> Callable[[], None]:
    """Return what closes the sessions again and again, by `invalidate_cache` or by another policy."""
    order = random.Random(7)

    def forget() -> None:
        if order.random() < 0.5:
            runner.invalidate_cache()
        else:
            runner.set_policy(order.choice(policies))
        time.sleep(order.choice((0.0, 0.001, 0.02, 0.05)))

    return forget


def test_forgotten_sessions_refuse_no_device_and_no_run() -> None:
    """Each run is answered with one version of the weight, and every device takes the graph afterwards."""
    with GraphDevices(scaled(), POLICIES[0]) as runner:
        takes = runner.devices()
        assert stress(runner, [forgetting(runner, POLICIES)]) == {}
        runner.set_policy(POLICIES[0])
        assert runner.devices() == takes
        assert [row.blocker for row in runner.rank()[: len(takes)]] == [None] * len(takes)


@pytest.mark.parametrize("bridge", [True, False])
def test_a_device_that_comes_back_wrong_gives_no_answer_beside_changes(bridge: bool, fault: FaultProvider) -> None:
    """Whatever is closed and changed meanwhile, and once it is right it is used again."""
    policies = [DevicePolicy.only(["cpu", "fault"]), DevicePolicy.only(["fault", "cpu"]).with_prefer(["cpu"])]
    options = Resilience(bridge=bridge, backoff_s=0.02, backoff_max_s=0.05)
    with GraphDevices(scaled(), policies[0], resilience=options) as runner:
        device, quarantine = Device("fault"), runner._failover.quarantine  # type: ignore[union-attr]
        runner.run("fault", {"x": np.ones(1, np.float32)})
        cycles = Counter[str]()

        def waits_for(done: Callable[[], bool], seconds: float) -> bool:
            until_s = time.monotonic() + seconds
            while not (found := done()) and time.monotonic() < until_s:
                time.sleep(0.001)
            return found

        def come_and_go() -> None:
            fault.dead = LOST
            if waits_for(lambda: quarantine.has_failed(device), 0.5):
                fault.factor, fault.dead = 1.5, ""
                cycles["let in wrong"] += waits_for(lambda: not quarantine.is_out(device), 0.1)
                fault.factor = 1.0
                cycles["let in right"] += waits_for(lambda: not quarantine.is_out(device), 0.5)
            fault.dead = ""
            time.sleep(0.05)

        assert stress(runner, [forgetting(runner, policies), come_and_go]) == {}
        assert cycles["let in wrong"] == 0
        fault.recover()

        def is_well() -> bool:
            runner.run_fastest({"x": np.ones(1, np.float32)})
            return all(row.state is HealthState.READY for row in runner.health())

        until(is_well)
        assert runner.run("fault", {"x": np.ones(1, np.float32)})[0].size == 1
        assert set(runner.devices()) == {Device.CPU, device}
