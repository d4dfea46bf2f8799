"""`GraphDevices`: choosing, compiling, running, falling back, and what each of them remembers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx_ort import CompileOptions, Device, DevicePolicy, Graph, PlacementRule, Resilience, environment, load
from rlx_ort.errors import (
    DeviceFallbackError,
    DeviceParseError,
    DeviceUnavailableError,
    InputError,
    NoViableDeviceError,
    ParamError,
    PlacementError,
)
from rlx_ort.graph_devices import GraphDevices, graph_param_names
from rlx_ort.ir.serde import save_json

ONES = np.ones((4, 3), np.float32)
X = np.arange(8, dtype=np.float32).reshape(2, 4)
Y = X @ ONES
INPUTS = {"x": X}
CPU, CUDA, WEBGPU = Device.CPU, Device.CUDA, Device.WEBGPU
Build = Callable[..., Graph]


@pytest.fixture
def runner(providers: Any, matmul_graph: Build) -> GraphDevices:
    """Return a runner of `x @ ones` on the three fake devices."""
    return GraphDevices(matmul_graph(ONES))


def _break(providers: Any, **failures: str) -> None:
    for kind, stage in failures.items():
        setattr(providers[kind], f"{stage}_failure", f"{kind} broke at {stage}")


def test_param_names_are_in_node_order(matmul_graph: Build) -> None:
    """Parameters are listed as they were added; inputs are not."""
    graph = matmul_graph()
    graph.param("a", [1])
    assert graph_param_names(graph) == ["w", "a"]
    assert graph_param_names(Graph("empty")) == []


def test_making_a_runner_opens_nothing(providers: Any, runner: GraphDevices) -> None:
    """Construction neither probes nor compiles."""
    assert [provider.opened for provider in providers.values()] == [0, 0, 0]
    assert runner.policy == DevicePolicy.all()


def test_devices_are_in_policy_order(runner: GraphDevices) -> None:
    """Preferred ones first, then platform priority; denied ones are absent."""
    assert runner.devices() == [CUDA, WEBGPU, CPU]
    runner.set_policy(DevicePolicy.all().with_prefer(["cpu"]).with_deny(["webgpu"]))
    assert runner.devices() == [CPU, CUDA]


def test_devices_are_a_snapshot(providers: Any, runner: GraphDevices) -> None:
    """A device that goes away stays listed until the cache is invalidated; the list returned is a copy."""
    assert CUDA in runner.devices()
    runner.devices().clear()
    assert CUDA in runner.devices()
    from rlx_ort.providers import registry

    providers["cuda"].probe_failure = "unplugged"
    registry.default_registry().forget()
    assert CUDA in runner.devices()
    runner.invalidate_cache()
    assert runner.devices() == [WEBGPU, CPU]


def test_from_env_reads_the_policy(providers: Any, matmul_graph: Build) -> None:
    """The variables become the policy, and a typo in one raises."""
    with environment.override({"RLX_DENY_DEVICES": "cuda"}):
        assert GraphDevices.from_env(matmul_graph()).devices() == [WEBGPU, CPU]
    with environment.override({"RLX_DEVICES": "cudda"}), pytest.raises(DeviceParseError, match="RLX_DEVICES"):
        GraphDevices.from_env(matmul_graph())


def test_the_default_policy_does_not_read_the_environment(providers: Any, matmul_graph: Build) -> None:
    """The constructor is literal; `from_env` and `load` look at the policy variables."""
    with environment.override({"RLX_DENY_DEVICES": "cuda"}):
        assert CUDA in GraphDevices(matmul_graph()).devices()


def test_load_reads_the_policy_variables_unless_a_policy_is_given(
    providers: Any, matmul_graph: Build, tmp_path: Path
) -> None:
    """What the environment denies is denied; a policy of the caller's is taken as it is; a typo raises."""
    path = tmp_path / "model.json"
    save_json(matmul_graph(ONES), path)
    with environment.override({"RLX_DENY_DEVICES": "cuda"}):
        assert load(path).devices() == [WEBGPU, CPU]
        assert load(path, DevicePolicy()).devices() == [CUDA, WEBGPU, CPU]
    with environment.override({"RLX_DENY_DEVICES": "cudda"}):
        assert load(path, DevicePolicy()).policy == DevicePolicy()
        with pytest.raises(DeviceParseError, match=r"RLX_DENY_DEVICES.*'cudda'"):
            load(path)


def test_fastest_is_the_smallest_prediction(runner: GraphDevices) -> None:
    """The device with the cheapest profile wins, whatever `RLX_DEVICE` says."""
    with environment.override({"RLX_DEVICE": "cpu"}):
        assert runner.fastest() == CUDA


def test_resolve_takes_the_hint_then_the_variable_then_the_fastest(runner: GraphDevices) -> None:
    """A hint beats `RLX_DEVICE`, which beats the prediction."""
    with environment.override({"RLX_DEVICE": "webgpu"}):
        assert runner.resolve("cpu") == CPU
        assert runner.resolve() == WEBGPU
    assert runner.resolve() == CUDA


def test_resolve_chain_takes_the_first_that_may_run(providers: Any, runner: GraphDevices) -> None:
    """With a chain, `RLX_DEVICE` does not count; with a hint the hint comes first and the chain after it."""
    _break(providers, cuda="probe")
    with environment.override({"RLX_DEVICE_CHAIN": "cuda,webgpu", "RLX_DEVICE": "cpu"}):
        assert runner.resolve_chain() == WEBGPU
        assert runner.resolve_chain("cpu") == CPU
        assert runner.resolve_chain("cuda") == WEBGPU
    assert runner.resolve_chain("cpu") == CPU
    with pytest.raises(DeviceUnavailableError):
        runner.resolve_chain("cuda")
    with environment.override({"RLX_DEVICE_CHAIN": "cuda"}), pytest.raises(NoViableDeviceError, match="cuda"):
        runner.resolve_chain()


def test_report_recommends_the_fastest(runner: GraphDevices) -> None:
    """One row a device, one of them recommended."""
    assert [row.device for row in runner.report() if row.recommended] == [CUDA]


def test_params_set_before_the_first_compile_reach_it(providers: Any, matmul_graph: Build) -> None:
    """The store is the runner's: what is set first is there for every device."""
    runner = GraphDevices(matmul_graph())
    runner.set_param("w", ONES)
    for device in (CPU, CUDA):
        np.testing.assert_array_equal(runner.run(device, INPUTS)[0], Y)


def test_params_set_later_reach_every_compiled_device(providers: Any, runner: GraphDevices) -> None:
    """A new value counts on all devices from their next run on; the last setter wins."""
    for device in ("cpu", "cuda"):
        runner.run(device, INPUTS)
    runner.set_param("w", ONES * 2)
    runner.set_param_typed("w", (ONES * 3).tobytes(), "f32")
    for device in ("cpu", "cuda"):
        np.testing.assert_array_equal(runner.run(device, INPUTS)[0], Y * 3)
    assert (providers["cpu"].sessions, providers["cuda"].sessions) == (1, 1)


def test_unset_and_unknown_params_are_errors(providers: Any, matmul_graph: Build) -> None:
    """Nothing runs on zeros, and a misspelt name is not kept."""
    runner = GraphDevices(matmul_graph())
    with pytest.raises(ParamError, match="'w'"):
        runner.run("cpu", INPUTS)
    with pytest.raises(ParamError, match="no parameter 'v'"):
        runner.set_param("v", ONES)


def test_sync_opens_stale_sessions_at_once(providers: Any, runner: GraphDevices) -> None:
    """After a sync the next run opens nothing; devices that were never compiled stay so."""
    runner.run("cpu", INPUTS)
    runner.set_param("w", ONES * 2)
    assert providers["cpu"].opened == 1
    runner.sync_params_to_all()
    assert (providers["cpu"].opened, providers["cuda"].opened) == (2, 0)
    np.testing.assert_array_equal(runner.run("cpu", INPUTS)[0], Y * 2)
    assert providers["cpu"].opened == 2


def test_update_params_is_one_version_on_all_devices(providers: Any, runner: GraphDevices) -> None:
    """A block of changes costs each device one session."""
    runner.run("cpu", INPUTS)
    with runner.update_params():
        runner.set_param("w", ONES * 4)
        runner.set_param("w", ONES * 2)
    np.testing.assert_array_equal(runner.run("cpu", INPUTS)[0], Y * 2)
    assert providers["cpu"].opened == 2


def test_compile_returns_the_same_object(runner: GraphDevices) -> None:
    """The second call compiles nothing."""
    assert runner.compile("cuda") is runner.compile(CUDA)
    assert runner.compile_resolved("cuda") is runner.compile("cuda")


def test_compile_under_threads_opens_one_session(providers: Any, runner: GraphDevices) -> None:
    """Threads that compile for one device at once share the result."""
    found = []
    threads = [threading.Thread(target=lambda: found.append(runner.compile("cpu"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(compiled) for compiled in found}) == 1
    assert providers["cpu"].opened == 1


def test_a_denied_device_never_runs(providers: Any, runner: GraphDevices) -> None:
    """Whatever way it is asked for, the error names the policy, and no session was opened."""
    runner.set_policy(DevicePolicy.all().with_deny(["cuda"]))
    for ask in (
        lambda: runner.compile("cuda"),
        lambda: runner.run("cuda", INPUTS),
        lambda: runner.run_resolved(INPUTS, "cuda"),
    ):
        with pytest.raises(NoViableDeviceError, match=r"CUDA.*denied by the policy"):
            ask()
    with pytest.raises(DeviceFallbackError, match="denied"):
        runner.run_try(["cuda"], INPUTS)
    assert providers["cuda"].opened == 0


def test_a_device_that_does_not_work_never_answers_from_another(providers: Any, runner: GraphDevices) -> None:
    """Naming a broken device raises; no other provider opens a session."""
    _break(providers, cuda="probe")
    with pytest.raises(DeviceUnavailableError, match="CUDA is not available: cuda broke at probe"):
        runner.run("cuda", INPUTS)
    assert (providers["cpu"].opened, providers["webgpu"].opened) == (0, 0)


def test_every_way_to_run_gives_the_same_answer(runner: GraphDevices) -> None:
    """Named, resolved, fastest, chosen with inputs, tried and chained runs agree."""
    answers = [
        runner.run("cpu", INPUTS),
        runner.run_resolved(INPUTS),
        runner.run_resolved(INPUTS, "webgpu"),
        runner.run_fastest(INPUTS),
        runner.run_resolved_with_inputs(INPUTS),
        runner.run_try(["cpu"], INPUTS)[1],
        runner.run_chain(INPUTS)[1],
        runner.compile_chain().run(INPUTS),
        runner.compile_resolved_with_inputs(INPUTS).run(INPUTS),
    ]
    for answer in answers:
        np.testing.assert_array_equal(answer[0], Y)


def test_named_is_strict_and_automatic_is_assisted(providers: Any, matmul_graph: Build) -> None:
    """A device that takes only part of the graph runs when chosen, and refuses when named; one session serves both."""
    graph = matmul_graph(ONES)
    graph.outputs = [graph.outputs[0], *graph.onnx_node("Relu", [graph.outputs[0]], types=[graph.outputs[0].type])]
    providers["cuda"].takes = lambda node: node.op_type == "MatMul"
    runner = GraphDevices(graph)
    assert runner.fastest() == CUDA
    runner.run_fastest(INPUTS)
    with pytest.raises(PlacementError, match="'relu'"):
        runner.run("cuda", INPUTS)
    runner.run_fastest(INPUTS)
    assert providers["cuda"].opened == 1
    assert runner.placement("cuda").requested_share == 0.5


def test_the_placement_option_overrides_both(providers: Any, matmul_graph: Build) -> None:
    """With the assisted rule in the options, a named device may be helped."""
    graph = matmul_graph(ONES)
    graph.outputs = [graph.outputs[0], *graph.onnx_node("Relu", [graph.outputs[0]], types=[graph.outputs[0].type])]
    providers["cuda"].takes = lambda node: node.op_type == "MatMul"
    runner = GraphDevices(graph, options=CompileOptions(placement=PlacementRule.ASSISTED))
    assert len(runner.run("cuda", INPUTS)) == 2


@pytest.mark.parametrize("stage", ["probe", "open", "run"])
def test_a_chain_goes_on_after_any_failure(providers: Any, runner: GraphDevices, stage: str) -> None:
    """A device that is not here, does not open or does not run is passed over, and the refusal is kept."""
    _break(providers, cuda=stage)
    device, outputs = runner.run_try(["cuda", "cpu"], INPUTS)
    assert device == CPU
    np.testing.assert_array_equal(outputs[0], Y)
    ((tried, reason),) = runner.last_attempts
    assert tried == CUDA
    assert f"cuda broke at {stage}" in reason


def test_a_chain_without_a_working_device_lists_every_attempt(providers: Any, runner: GraphDevices) -> None:
    """The error has each device with its reason, in order, duplicates retried."""
    _break(providers, cuda="probe", webgpu="open", cpu="run")
    with pytest.raises(DeviceFallbackError) as caught:
        runner.run_try(["cuda", "webgpu", "cpu", "webgpu"], INPUTS)
    assert [device for device, _ in caught.value.attempts] == [CUDA, WEBGPU, CPU, WEBGPU]
    for (device, reason), stage in zip(caught.value.attempts, ("probe", "open", "run", "open"), strict=True):
        assert f"{device.label} broke at {stage}" in reason
    with pytest.raises(DeviceFallbackError) as caught:
        runner.run_try([], INPUTS)
    assert [device for device, _ in caught.value.attempts] == [CPU]


def test_run_chain_honours_the_chain_with_and_without_a_hint(providers: Any, runner: GraphDevices) -> None:
    """The hint is tried first, then the chain of the environment; without both, what `resolve` says."""
    _break(providers, cuda="run")
    with environment.override({"RLX_DEVICE_CHAIN": "cuda,webgpu"}):
        assert runner.run_chain(INPUTS)[0] == WEBGPU
        assert runner.run_chain(INPUTS, "cpu")[0] == CPU
        assert runner.run_chain(INPUTS, "cuda")[0] == WEBGPU
    with pytest.raises(DeviceFallbackError) as caught:
        runner.run_chain(INPUTS, "cuda")
    assert [device for device, _ in caught.value.attempts] == [CUDA]
    with pytest.raises(DeviceFallbackError) as caught:
        runner.run_chain(INPUTS)
    assert [device for device, _ in caught.value.attempts] == [CUDA]


def test_run_chain_without_any_device_is_one_attempt_of_the_cpu(runner: GraphDevices) -> None:
    """A choice that fails is an attempt too."""
    runner.set_policy(DevicePolicy.only([]))
    with pytest.raises(DeviceFallbackError) as caught:
        runner.run_chain(INPUTS)
    assert [device for device, _ in caught.value.attempts] == [CPU]


def test_wrong_inputs_are_no_attempts(runner: GraphDevices) -> None:
    """Inputs that are wrong everywhere raise at once and as what they are."""
    for ask in (lambda: runner.run_try(["cuda", "cpu"], {}), lambda: runner.run_chain({})):
        with pytest.raises(InputError):
            ask()


def test_the_chain_leaves_the_inputs_unchanged(providers: Any, runner: GraphDevices) -> None:
    """Each attempt gets the same inputs."""
    _break(providers, cuda="run")
    inputs = {"x": X.tolist()}
    runner.run_try(["cuda", "cpu"], inputs)
    assert inputs == {"x": X.tolist()}


def test_warm_all_compiles_what_it_can(providers: Any, runner: GraphDevices) -> None:
    """Every device that takes the graph is compiled, in order; one that fails is left out."""
    _break(providers, webgpu="open")
    assert runner.warm_all() == [CUDA, CPU]
    assert (providers["cuda"].opened, providers["cpu"].opened) == (1, 1)


def test_benchmark_times_every_device_and_reports_failures(providers: Any, runner: GraphDevices) -> None:
    """Working devices are sorted by their median; failing ones come last with the reason."""
    _break(providers, cuda="run")
    rows = runner.benchmark(INPUTS, 3)
    medians = [row.median_exec_ns for row in rows[:2]]
    assert medians == sorted(medians)
    assert all(median > 0 for median in medians)
    assert {row.device for row in rows[:2]} == {CPU, WEBGPU}
    assert (rows[2].device, rows[2].median_exec_ns) == (CUDA, None)
    assert "cuda broke at run" in rows[2].failure


def test_a_benchmark_warms_up_once_and_runs_at_least_once(providers: Any, runner: GraphDevices) -> None:
    """A count below 1 is 1, and one more run is not timed."""
    runner.set_policy(DevicePolicy.only(["cpu"]))
    runner.benchmark(INPUTS, 0)
    session = runner.compile_fastest()._slot.current
    assert session is not None
    assert session.session.runs == 2


def test_a_benchmark_winner_is_kept_per_input_signature(providers: Any, runner: GraphDevices) -> None:
    """The same shapes are not timed again; other shapes are; an invalidated cache forgets."""
    runner.set_policy(DevicePolicy.only(["cuda", "cpu"]).with_benchmark_pick(1))
    timed: list[int] = []
    measure = runner._sessions.benchmark

    def counted(inputs: Any, runs: int = 10) -> Any:
        timed.append(runs)
        return measure(inputs, runs)

    runner._sessions.benchmark = counted  # type: ignore[method-assign]  # counts the calls
    with environment.override({"RLX_DEVICE": "webgpu"}):
        winner = runner.resolve_with_inputs(INPUTS)
        assert winner in (CUDA, CPU)
    assert runner.resolve_with_inputs(INPUTS) == winner
    assert timed == [1]
    runner.resolve_with_inputs({"x": X[:1]})
    assert timed == [1, 1]
    assert runner.resolve_with_inputs(INPUTS, "cpu") == CPU
    assert timed == [1, 1]
    runner.invalidate_cache()
    runner.resolve_with_inputs(INPUTS)
    assert timed == [1, 1, 1]


def test_a_cache_that_is_invalidated_during_a_benchmark_costs_no_answer(providers: Any, runner: GraphDevices) -> None:
    """As another thread's `set_policy` may do; the winner counts for this call and is not remembered."""
    runner.set_policy(DevicePolicy.only(["cpu"]).with_benchmark_pick(1))
    timed: list[int] = []
    measure = runner._sessions.benchmark

    def disturbed(inputs: Any, runs: int = 10) -> Any:
        timed.append(runs)
        rows = measure(inputs, runs)
        runner.invalidate_cache()
        return rows

    runner._sessions.benchmark = disturbed  # type: ignore[method-assign]  # stands for the other thread
    assert [runner.resolve_with_inputs(INPUTS) for _ in range(2)] == [CPU, CPU]
    assert timed == [1, 1]


def test_a_benchmark_in_which_all_fail_lists_them(providers: Any, runner: GraphDevices) -> None:
    """No winner is made up."""
    runner.set_policy(DevicePolicy.all().with_benchmark_pick(1))
    _break(providers, cuda="run", webgpu="run", cpu="open")
    with pytest.raises(DeviceFallbackError) as caught:
        runner.resolve_with_inputs(INPUTS)
    assert {device for device, _ in caught.value.attempts} == {CUDA, WEBGPU, CPU}


def test_without_the_benchmark_strategy_inputs_do_not_matter(runner: GraphDevices) -> None:
    """`resolve_with_inputs` is then `resolve`, so `RLX_DEVICE` counts."""
    with environment.override({"RLX_DEVICE": "webgpu"}):
        assert runner.resolve_with_inputs(INPUTS) == WEBGPU


def test_invalidating_closes_sessions_and_keeps_params(providers: Any, matmul_graph: Build) -> None:
    """The weights are there for the next compile."""
    runner = GraphDevices(matmul_graph())
    runner.set_param("w", ONES)
    runner.run("cpu", INPUTS)
    runner.invalidate_cache()
    assert providers["cpu"].sessions == 0
    np.testing.assert_array_equal(runner.run("cpu", INPUTS)[0], Y)
    assert providers["cpu"].opened == 2


def test_a_graph_that_grows_is_compiled_anew(providers: Any, matmul_graph: Build) -> None:
    """An answer is never that of the graph as it was before."""
    graph = matmul_graph(ONES)
    runner = GraphDevices(graph)
    assert len(runner.run("cpu", INPUTS)) == 1
    graph.param("extra", [1], data=[1])
    graph.set_outputs([graph.outputs[0]] * 2, ["a", "b"])
    assert len(runner.run("cpu", INPUTS)) == 2
    runner.set_param("extra", [2.0])


def test_closing_a_runner_closes_every_session(providers: Any, runner: GraphDevices) -> None:
    """A `with` block leaves nothing open, and the runner can be used again."""
    with runner:
        runner.warm_all()
    assert [provider.sessions for provider in providers.values()] == [0, 0, 0]
    np.testing.assert_array_equal(runner.run("cpu", INPUTS)[0], Y)


@pytest.mark.parametrize("resilience", [None, Resilience()], ids=["plain", "resilient"])
@pytest.mark.parametrize("forget", ["invalidate_cache", "set_policy"])
def test_runs_answer_while_another_thread_forgets_the_sessions(
    providers: Any, matmul_graph: Build, forget: str, resilience: Resilience | None
) -> None:
    """Every run is right, and the device that was closed under it is not noted as refusing the graph."""
    policy = DevicePolicy.only("cpu")
    runner = GraphDevices(matmul_graph(ONES), policy, resilience=resilience)
    done = threading.Event()
    ways = (runner.run_resolved, runner.run_fastest, lambda inputs: runner.run("cpu", inputs), _chosen(runner))

    def go(run: Callable[[Any], Any]) -> None:
        while not done.is_set():
            np.testing.assert_array_equal(run(INPUTS)[0], Y)

    with ThreadPoolExecutor(len(ways)) as pool:
        futures = [pool.submit(go, run) for run in ways]
        for _ in range(100):
            runner.invalidate_cache() if forget == "invalidate_cache" else runner.set_policy(policy)
            time.sleep(0.002)
        done.set()
        for future in futures:
            future.result(10)
    assert runner.devices() == [CPU]


def _chosen(runner: GraphDevices) -> Callable[[Any], Any]:
    return lambda inputs: runner.run_chosen(inputs)[1]


def test_a_policy_is_no_name(runner: GraphDevices) -> None:
    """A name in place of a policy is refused, and the old policy stays."""
    with pytest.raises(DeviceParseError, match=r"DevicePolicy\.only"):
        runner.set_policy("cpu")  # type: ignore[arg-type]  # what is tested
    assert runner.policy == DevicePolicy()
