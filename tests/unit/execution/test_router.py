"""The router, the flexible session and the manifest: what joins several devices to one graph or many."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx_ort import Device, DevicePolicy, Graph, NoViableDeviceError, RunError, compat, environment
from rlx_ort.compat import BackendsManifest, DeviceRouter, FlexibleSession
from rlx_ort.options.compile_options import CompileOptions, PlacementRule, Precision
from rlx_ort.providers import hardware

CPU, CUDA, WEBGPU = Device.CPU, Device.CUDA, Device.WEBGPU
WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3)
INPUTS = {"x": np.ones((2, 4), np.float32)}
Build = Callable[..., Graph]


def test_a_router_opens_every_device_when_it_is_made(providers: Any, matmul_graph: Build) -> None:
    """Each device has its session before the first run."""
    DeviceRouter(matmul_graph(WEIGHTS))
    assert {kind: fake.opened for kind, fake in providers.items()} == {"cpu": 1, "cuda": 1, "webgpu": 1}


def test_a_router_tells_where_it_ran(providers: Any, matmul_graph: Build) -> None:
    """The fastest by default, the one named otherwise."""
    route = DeviceRouter(matmul_graph(WEIGHTS))
    device, outputs = route.run(INPUTS)
    assert device == CUDA
    np.testing.assert_array_equal(outputs[0], INPUTS["x"] @ WEIGHTS)
    assert route.run(INPUTS, "cpu")[0] == CPU


def test_a_router_lists_labels_best_first(providers: Any, matmul_graph: Build) -> None:
    """In the order of the policy."""
    route = DeviceRouter(matmul_graph(WEIGHTS), DevicePolicy().with_prefer(["cpu"]).with_deny(["webgpu"]))
    assert route.devices() == ["cpu", "cuda"]


def test_a_router_follows_the_chain(providers: Any, matmul_graph: Build) -> None:
    """`RLX_DEVICE_CHAIN` decides where `run_chain` goes."""
    route = DeviceRouter(matmul_graph(WEIGHTS))
    with environment.override({"RLX_DEVICE_CHAIN": "webgpu,cpu"}):
        assert route.run_chain(INPUTS)[0] == WEBGPU


def test_new_weights_reach_every_device_of_a_router(providers: Any, matmul_graph: Build) -> None:
    """One store is behind all of them."""
    route = DeviceRouter(matmul_graph(WEIGHTS))
    route.set_param("w", 2 * WEIGHTS)
    for device in ("cpu", "cuda"):
        np.testing.assert_array_equal(route.run_on(device, INPUTS)[0], 2 * INPUTS["x"] @ WEIGHTS)


def test_a_router_without_a_device_raises(providers: Any, matmul_graph: Build) -> None:
    """At once, and with the reason."""
    with pytest.raises(NoViableDeviceError):
        DeviceRouter(matmul_graph(WEIGHTS), DevicePolicy.only([]))


def test_heat_makes_a_router_open_its_sessions_anew_once(
    providers: Any, matmul_graph: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Being hot for long is no reason to do it at every run; getting hot again is."""
    monkeypatch.setattr(compat, "_CHECK_EVERY_S", 0.0)
    hot = iter([False, True, True, False, True])
    route = DeviceRouter(matmul_graph(WEIGHTS), throttled=lambda: next(hot))
    opened = []
    for _ in range(5):
        route.run(INPUTS)
        opened.append(providers["cpu"].opened)
    assert opened == [1, 2, 2, 2, 3]


def test_a_router_may_be_told_to_ignore_heat(
    providers: Any, matmul_graph: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nobody asks."""
    monkeypatch.setattr(compat, "_CHECK_EVERY_S", 0.0)

    def asked() -> bool:
        raise AssertionError("the heat was looked at")

    DeviceRouter(matmul_graph(WEIGHTS), rebench_on_throttle=False, throttled=asked).run(INPUTS)


def test_a_router_reads_its_policy_from_the_environment(providers: Any, matmul_graph: Build) -> None:
    """`RLX_DEVICES` restricts it."""
    with environment.override({"RLX_DEVICES": "cpu"}):
        assert DeviceRouter.from_env(matmul_graph(WEIGHTS)).devices() == ["cpu"]


@pytest.mark.parametrize(
    ("report", "limited"),
    [("CPU_Speed_Limit \t= 100", False), ("Note\n CPU_Speed_Limit = 80\n", True), ("", False)],
)
def test_a_speed_limit_below_100_is_heat(report: str, limited: bool) -> None:
    """As macOS prints it."""
    assert hardware._limited_by(report) is limited


def test_a_throttle_counter_that_grew_is_heat(tmp_path: Any) -> None:
    """What was counted before the first question does not count."""
    counter = tmp_path / "cpu0" / "thermal_throttle" / "core_throttle_count"
    counter.parent.mkdir(parents=True)
    answers = []
    for count in ("7", "7", "9", "9", "broken"):
        counter.write_text(count, encoding="utf-8")
        answers.append(hardware._more_than_before(tmp_path))
    assert answers == [False, False, True, False, False]


def test_a_flexible_session_compiles_on_the_device_it_is_told(providers: Any, matmul_graph: Build) -> None:
    """The same session serves several devices and graphs."""
    session = FlexibleSession()
    for device in (CPU, CUDA):
        assert session.compile_on(device, matmul_graph(WEIGHTS)).device == device


def test_a_flexible_session_resolves_as_a_runner_does(providers: Any, matmul_graph: Build) -> None:
    """A hint beats the variable, which beats the prediction; the policy restricts all."""
    graph = matmul_graph(WEIGHTS)
    assert FlexibleSession().compile_resolved(graph).device == CUDA
    with environment.override({"RLX_DEVICE": "webgpu"}):
        assert FlexibleSession().compile_resolved(graph).device == WEBGPU
        assert FlexibleSession().compile_resolved(graph, "cpu").device == CPU
    assert FlexibleSession(DevicePolicy().with_deny(["cuda"])).compile_resolved(graph).device == WEBGPU


def test_a_flexible_session_is_strict_only_where_somebody_named_the_device(providers: Any, matmul_graph: Build) -> None:
    """An automatic choice may be helped by the CPU."""
    graph = matmul_graph(WEIGHTS)
    assert FlexibleSession().compile_resolved(graph).rule is PlacementRule.ASSISTED
    assert FlexibleSession().compile_resolved(graph, "cuda").rule is PlacementRule.STRICT


def test_a_graph_of_a_flexible_session_owns_its_session(providers: Any, matmul_graph: Build) -> None:
    """Closing it closes the session, as there is no runner that could use it again."""
    compiled = FlexibleSession().compile_resolved(matmul_graph(WEIGHTS))
    compiled.close()
    assert compiled.closed
    with pytest.raises(RunError, match="closed"):
        compiled.run(INPUTS)


def test_a_flexible_session_takes_options_for_one_graph(providers: Any, matmul_graph: Build) -> None:
    """They replace the session's own for that graph alone."""
    session = FlexibleSession(options=CompileOptions(precision=Precision.F32))
    given = CompileOptions(placement=PlacementRule.ASSISTED)
    assert session.compile_on("cpu", matmul_graph(WEIGHTS), options=given).rule is PlacementRule.ASSISTED
    assert session.compile_on("cpu", matmul_graph(WEIGHTS)).rule is PlacementRule.STRICT
    assert session.with_precision("tf32").precision is Precision.TF32


def test_a_manifest_lists_the_providers_as_data(providers: Any) -> None:
    """Names, kinds and devices, and JSON that can be read again."""
    manifest = BackendsManifest.current()
    assert {backend.kinds for backend in manifest.backends} == {("cpu",), ("cuda",), ("webgpu",)}
    assert json.loads(manifest.json())["package"] == "rlx_ort"
