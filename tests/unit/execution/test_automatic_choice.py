"""An automatic choice answers while one allowed device can, and remembers which ones refused."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx_ort import Device, DevicePolicy, DeviceRouter, FlexibleSession, Graph, GraphDevices, environment, rank
from rlx_ort.errors import (
    DeviceFallbackError,
    DeviceUnavailableError,
    EngineError,
    IntegrityError,
    LegalizeError,
    NoViableDeviceError,
    ParamError,
    PlacementError,
)
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.providers import registry

ONES = np.ones((4, 3), np.float32)
X = np.arange(8, dtype=np.float32).reshape(2, 4)
Y = X @ ONES
INPUTS = {"x": X}
CPU, CUDA, WEBGPU = Device.CPU, Device.CUDA, Device.WEBGPU
SECOND = Device("cuda:1")
FULL = EngineError("out of memory on the card")
Build = Callable[..., Graph]


@pytest.fixture
def runner(providers: Any, matmul_graph: Build) -> GraphDevices:
    """Return a runner of `x @ ones`; by prediction CUDA is best, then WebGPU, then the CPU."""
    return GraphDevices(matmul_graph(ONES))


def half_on_cuda(providers: Any, matmul_graph: Build) -> Graph:
    """Return a graph of which CUDA leaves a node to the CPU, as only an open session shows."""
    graph = matmul_graph(ONES)
    graph.outputs = [graph.outputs[0], *graph.onnx_node("Relu", [graph.outputs[0]], types=[graph.outputs[0].type])]
    providers["cuda"].takes = lambda node: node.op_type == "MatMul"
    return graph


@pytest.mark.parametrize(
    "ask",
    [
        lambda runner: runner.run_fastest(INPUTS),
        lambda runner: runner.compile_fastest().run(INPUTS),
        lambda runner: runner.run_resolved(INPUTS),
        lambda runner: runner.compile_resolved().run(INPUTS),
        lambda runner: runner.run_resolved_with_inputs(INPUTS),
        lambda runner: runner.compile_resolved_with_inputs(INPUTS).run(INPUTS),
        lambda runner: runner.compile_chain().run(INPUTS),
        lambda runner: runner.run_chain(INPUTS)[1],
    ],
)
def test_every_automatic_path_passes_over_a_device_that_refuses(
    ask: Any, providers: Any, runner: GraphDevices, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one answers; the log and `last_attempts` have the reason."""
    providers["cuda"].refuses["cuda"] = FULL
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(ask(runner)[0], Y)
    assert providers["webgpu"].opened == 1
    assert runner.last_attempts == ((CUDA, str(FULL)),)
    assert "CUDA" in caplog.text
    assert str(FULL) in caplog.text


@pytest.mark.parametrize(
    "error",
    [FULL, PlacementError("strays"), LegalizeError("no kernel"), DeviceUnavailableError(CUDA, "lost"), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_what_a_device_is_the_reason_of_is_a_refusal(error: Exception, providers: Any, runner: GraphDevices) -> None:
    """Placement, kernels, the engine, the device itself and memory."""
    providers["cuda"].refuses["cuda"] = error
    np.testing.assert_array_equal(runner.run_fastest(INPUTS)[0], Y)
    assert [device for device, _ in runner.last_attempts] == [CUDA]


@pytest.mark.parametrize("error", [IntegrityError("changed"), KeyError("bug")], ids=lambda error: type(error).__name__)
def test_what_is_wrong_on_every_device_is_raised_at_once(error: Exception, providers: Any, runner: Any) -> None:
    """A broken package or a bug is no reason to change the device."""
    providers["cuda"].refuses["cuda"] = error
    with pytest.raises(type(error)):
        runner.run_fastest(INPUTS)
    assert providers["webgpu"].opened == 0


def test_a_parameter_that_is_not_set_passes_over_no_device(providers: Any, matmul_graph: Build) -> None:
    """It is the caller's to set it, and no device is to blame afterwards."""
    runner = GraphDevices(matmul_graph())
    with pytest.raises(ParamError, match="'w'"):
        runner.run_fastest(INPUTS)
    assert runner.last_attempts == ()
    assert runner.fastest() == CUDA


def test_a_refusal_that_comes_after_the_parameters_were_set_is_passed_over(providers: Any, matmul_graph: Build) -> None:
    """The session is then opened by the run, and the next device answers all the same."""
    runner = GraphDevices(matmul_graph())
    assert runner.compile_fastest().device == CUDA
    runner.set_param("w", ONES)
    providers["cuda"].refuses["cuda"] = FULL
    np.testing.assert_array_equal(runner.run_fastest(INPUTS)[0], Y)


def test_a_refusal_is_remembered_for_the_graph(providers: Any, runner: GraphDevices) -> None:
    """The device is not tried again, and every list shows why."""
    providers["cuda"].refuses["cuda"] = FULL
    runner.run_fastest(INPUTS)
    providers["cuda"].refuses.clear()
    runner.run_fastest(INPUTS)
    assert providers["cuda"].opened == 0
    assert runner.fastest() == WEBGPU
    assert runner.devices() == [WEBGPU, CPU]
    for rows in (runner.report(), runner.rank()):
        (row,) = (row for row in rows if row.device == CUDA)
        assert row.blocker == f"refused the graph when its session was opened: {FULL}"
        assert (row.recommended, row.predicted_ns) == (False, None)
    assert GraphDevices(runner.graph).fastest() == WEBGPU


def test_a_refusal_counts_for_its_options_only(providers: Any, runner: GraphDevices) -> None:
    """With another limit of memory the device may well take the graph."""
    providers["cuda"].refuses["cuda"] = FULL
    runner.run_fastest(INPUTS)
    assert GraphDevices(runner.graph, options=CompileOptions(device_memory_limit_bytes=10**9)).fastest() == CUDA


@pytest.mark.parametrize("change", ["cache", "graph", "providers", "policy"])
def test_a_refusal_is_forgotten_when_something_changed(change: str, providers: Any, runner: GraphDevices) -> None:
    """A new graph, new providers or a fresh start may go well."""
    providers["cuda"].refuses["cuda"] = FULL
    runner.run_fastest(INPUTS)
    if change == "cache":
        runner.invalidate_cache()
    elif change == "graph":
        runner.graph.param("extra", [1], data=[1])
    elif change == "providers":
        registry.default_registry().forget()
    else:
        runner.set_policy(DevicePolicy().with_deny(["webgpu"]))
    assert runner.fastest() == CUDA


def test_a_refusal_is_forgotten_when_the_device_was_named_and_took_the_graph(providers: Any, runner: Any) -> None:
    """What was busy may be free again."""
    providers["cuda"].refuses["cuda"] = FULL
    with pytest.raises(EngineError):
        runner.run("cuda", INPUTS)
    assert runner.devices() == [WEBGPU, CPU]
    providers["cuda"].refuses.clear()
    runner.run("cuda", INPUTS)
    assert runner.devices() == [CUDA, WEBGPU, CPU]


def test_a_refusal_keeps_no_graph_alive(providers: Any, matmul_graph: Build, caplog: pytest.LogCaptureFixture) -> None:
    """It goes with the graph."""
    providers["cuda"].refuses["cuda"] = EngineError("its traceback has the graph, too")
    graph = matmul_graph(ONES)
    GraphDevices(graph).run_fastest(INPUTS)
    kept = weakref.ref(graph)
    providers["cuda"].refuses.clear()
    del graph
    gc.collect()
    assert kept() is None


def test_when_every_device_refuses_the_error_has_each_reason(providers: Any, runner: GraphDevices) -> None:
    """One error for all of them, and the same again without another try."""
    for kind, fake in providers.items():
        fake.refuses[kind] = EngineError(f"{kind} is full")
    for _ in range(2):
        with pytest.raises(NoViableDeviceError) as caught:
            runner.run_fastest(INPUTS)
        reasons = dict(caught.value.blockers)
        assert all(f"{kind} is full" in reasons[Device(kind)] for kind in providers)
    with pytest.raises(DeviceFallbackError) as failed:
        runner.run_chain(INPUTS)
    assert {device for device, _ in failed.value.attempts} == {CPU, CUDA, WEBGPU}


def test_a_device_named_in_the_call_fails_loudly(providers: Any, runner: GraphDevices) -> None:
    """Nothing else answers for it."""
    providers["cuda"].refuses["cuda"] = FULL
    for ask in (
        lambda: runner.run("cuda", INPUTS),
        lambda: runner.run_resolved(INPUTS, "cuda"),
        lambda: runner.compile_resolved("cuda"),
        lambda: runner.compile_resolved_with_inputs(INPUTS, "cuda"),
        lambda: FlexibleSession().compile_resolved(runner.graph, "cuda"),
    ):
        with pytest.raises(EngineError, match="out of memory"):
            ask()
    assert (providers["cpu"].opened, providers["webgpu"].opened) == (0, 0)


def test_rlx_device_that_refuses_is_skipped_with_a_warning(
    providers: Any, runner: GraphDevices, caplog: pytest.LogCaptureFixture
) -> None:
    """The ranking takes over."""
    providers["webgpu"].refuses["webgpu"] = FULL
    with environment.override({"RLX_DEVICE": "webgpu"}), caplog.at_level(logging.WARNING):
        compiled = runner.compile_resolved()
        assert runner.resolve() == CUDA
    assert compiled.device == CUDA
    assert "RLX_DEVICE asks for WebGPU, which is skipped: out of memory" in caplog.text


def test_rlx_device_is_strict_and_the_ranking_after_it_is_assisted(providers: Any, matmul_graph: Build) -> None:
    """A device that needs help is refused as the one named, and may still be the automatic choice."""
    runner = GraphDevices(half_on_cuda(providers, matmul_graph))
    with environment.override({"RLX_DEVICE": "cuda"}):
        compiled = runner.compile_resolved()
    assert (compiled.device, compiled.rule) == (CUDA, PlacementRule.ASSISTED)


@pytest.mark.parametrize("error", [FULL, MemoryError()], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("pick", [DevicePolicy().with_benchmark_pick(1), DevicePolicy().with_adaptive_pick(1)])
def test_the_measuring_picks_pass_over_a_device_that_refuses(
    pick: DevicePolicy, error: Exception, providers: Any, runner: GraphDevices
) -> None:
    """Whether it was timed or believed, the next one answers and the refusal is known."""
    runner.set_policy(pick)
    providers["cuda"].refuses["cuda"] = error
    np.testing.assert_array_equal(runner.run_resolved_with_inputs(INPUTS)[0], Y)
    assert CUDA not in runner.devices()


def test_a_chain_of_the_environment_is_compiled_for_the_first_that_takes_it(providers: Any, runner: Any) -> None:
    """`compile_chain` goes on, as `run_chain` does."""
    providers["cuda"].refuses["cuda"] = FULL
    with environment.override({"RLX_DEVICE_CHAIN": "cuda,cpu"}):
        assert runner.compile_chain().device == CPU
    assert runner.last_attempts == ((CUDA, str(FULL)),)


def test_listed_devices_are_accepted_by_run(providers: Any, matmul_graph: Build) -> None:
    """A device that the CPU has to help is not listed, and is in the ranking."""
    graph = half_on_cuda(providers, matmul_graph)
    runner = GraphDevices(graph)
    with pytest.raises(PlacementError):
        runner.run("cuda", INPUTS)
    assert runner.devices() == [WEBGPU, CPU]
    for device in runner.devices():
        runner.run(device, INPUTS)
    assert runner.rank()[0].device == CUDA
    assert CUDA in runner.warm_all()


def test_warming_without_the_parameters_raises(providers: Any, matmul_graph: Build) -> None:
    """No session can be opened, so none is said to be."""
    runner = GraphDevices(matmul_graph())
    with pytest.raises(ParamError, match="'w'"):
        runner.warm_all()
    runner.set_param("w", ONES)
    assert runner.warm_all() == [CUDA, WEBGPU, CPU]
    assert [fake.sessions for fake in providers.values()] == [1, 1, 1]


def test_every_index_is_a_candidate(providers: Any, runner: GraphDevices) -> None:
    """The second card is listed, reported, and chosen when the first refuses."""
    providers["cuda"].cards = 2
    providers["cuda"].refuses["cuda"] = FULL
    assert SECOND in [row.device for row in runner.report()]
    assert runner.devices() == [CUDA, SECOND, WEBGPU, CPU]
    assert runner.compile_fastest().device == SECOND


def test_the_policy_decides_which_indexes_count(providers: Any, runner: GraphDevices) -> None:
    """Deny one, allow one, or deny the kind."""
    providers["cuda"].cards = 2
    for policy, allowed in (
        (DevicePolicy(deny=["cuda:1"]), [CUDA, WEBGPU, CPU]),
        (DevicePolicy(deny=["cuda"]), [WEBGPU, CPU]),
        (DevicePolicy(allow=["cuda:1"]), [SECOND]),
        (DevicePolicy(allow="cuda"), [CUDA]),
    ):
        runner.set_policy(policy)
        assert runner.devices() == allowed
        assert [row.device for row in runner.rank() if row.blocker is None] == allowed
    with pytest.raises(NoViableDeviceError, match="only: cuda"):
        runner.run("cuda:1", INPUTS)


def test_a_device_denied_by_another_name_never_runs(providers: Any, runner: GraphDevices) -> None:
    """Strings in the constructor deny as well, under every name of the GPU."""
    runner.set_policy(DevicePolicy(deny=["vulkan"]))
    with pytest.raises(NoViableDeviceError, match=r"deny: vulkan, which covers webgpu"):
        runner.run("webgpu", INPUTS)
    assert runner.devices() == [CUDA, CPU]
    assert providers["webgpu"].opened == 0


def test_rank_is_best_first_and_blocked_last(providers: Any, runner: GraphDevices) -> None:
    """With the prediction or the blocker; denied devices have no row."""
    providers["cuda"].probe_failure = "unplugged"
    rows = rank(runner.graph, policy=DevicePolicy(allow="cpu,cuda,webgpu,metal", deny="metal"))
    assert [row.device for row in rows] == [WEBGPU, CPU, CUDA]
    assert [row.recommended for row in rows] == [True, False, False]
    assert rows[0].predicted_ns < rows[1].predicted_ns
    assert "unplugged" in rows[2].blocker


def test_every_pick_is_sized_by_the_real_inputs(providers: Any, matmul_graph: Build) -> None:
    """A few rows are quickest on the device with the short round trip, many on the one with the high rates."""
    from rlx_ort.providers.base import CostProfile

    providers["cpu"].profile = CostProfile(1.0, 1.0, 1.0, 100.0, 100.0, 0.0, 0.0)
    providers["cuda"].profile = CostProfile(1000.0, 1000.0, 1000.0, 9_000.0, 9_000.0, 0.0, 0.0)
    runner = GraphDevices(matmul_graph(ONES), DevicePolicy.only("cpu,cuda"))
    few, many = ({"x": np.ones((rows, 4), np.float32)} for rows in (2, 65536))
    for inputs, best in ((few, CPU), (many, CUDA)):
        assert runner.rank(inputs)[0].device == best
        assert rank(runner.graph, inputs, runner.policy)[0].assumed_dims == ()
        assert runner.fastest(inputs) == best
        assert runner.resolve_with_inputs(inputs) == best
        assert runner.compile_resolved_with_inputs(inputs).device == best
        before = providers[best.kind].opened
        runner.run_fastest(inputs)
        runner.run_resolved(inputs)
        assert runner.run_chain(inputs)[0] == best
        assert providers[best.kind].opened == before
    assert runner.fastest() == CPU


def test_a_router_whose_parameters_are_not_set_raises(providers: Any, matmul_graph: Build) -> None:
    """It promises warm devices."""
    with pytest.raises(ParamError):
        DeviceRouter(matmul_graph())
