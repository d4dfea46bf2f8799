"""Resolving: the hint, the environment, the fastest; chains; running with fallback."""

import logging
from typing import Any

import pytest

from rlx_ort import CompileOptions, Device, DevicePolicy, PlacementRule
from rlx_ort.errors import (
    DeviceFallbackError,
    DeviceParseError,
    DeviceUnavailableError,
    EngineError,
    GraphVerifyError,
    InputError,
    IntegrityError,
    LegalizeError,
    NoViableDeviceError,
    ParamError,
    PlacementError,
)
from rlx_ort.selection.resolve import resolve_device, resolve_device_chain, run_with_fallback

CPU, CUDA, GPU, METAL = Device.CPU, Device.CUDA, Device.GPU, Device.METAL
ASSISTED = CompileOptions(placement=PlacementRule.ASSISTED)


@pytest.fixture
def graph(machine: Any) -> Any:
    """A graph that cuda and cpu take, of which cuda is predicted to be slower; metal is away, gpu lacks the kernel."""
    for kind, roundtrip_ns in (("cuda", 300.0), ("cpu", 100.0)):
        profile = machine.profile(gemm_gflops=1e12, memory_bytes_per_ns=1e12, roundtrip_ns=roundtrip_ns)
        machine.add(kind, kernels=machine.kernels("Erf", "Cos"), profile=profile)
    machine.add("metal", answer=machine.away)
    machine.add("gpu", kernels=machine.kernels("Cos"))
    return machine.chain("Erf")


NO_CUDA, BENCHMARK = DevicePolicy().with_deny(["cuda"]), DevicePolicy().with_benchmark_pick(3)
RESOLVED: dict[str, tuple[dict[str, str], Any, Device]] = {
    "the fastest": ({}, lambda graph: resolve_device(graph), CPU),
    "a hint though another is faster": ({}, lambda graph: resolve_device(graph, "cuda"), CUDA),
    "the variable before the cost model": ({"RLX_DEVICE": "cuda"}, lambda graph: resolve_device(graph), CUDA),
    "no variable with a prefix of policies": ({"MYAPP_DEVICE": "cuda"}, lambda graph: resolve_device(graph), CPU),
    "nothing by running": ({}, lambda graph: resolve_device(graph, policy=BENCHMARK), CPU),
    "the first of a chain that is viable": (
        {},
        lambda graph: resolve_device_chain(graph, ["metal", "gpu", "cuda", "cpu"]),
        CUDA,
    ),
    "no denied one of a chain": ({}, lambda graph: resolve_device_chain(graph, ["cuda", "cpu"], NO_CUDA), CPU),
}


@pytest.mark.parametrize(("variables", "resolve", "device"), RESOLVED.values(), ids=RESOLVED)
def test_what_is_resolved(
    variables: dict[str, str], resolve: Any, device: Device, graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint, the environment, the cost model, in this order; of a chain the order and not the speed."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert resolve(graph) == device


@pytest.mark.parametrize(("wish", "why"), [("metal", "libfake"), ("gpu", "node 1 'erf'"), ("tpu", "no ONNX Runtime")])
def test_a_device_of_the_environment_that_cannot_run_is_skipped_with_a_warning(
    wish: str, why: str, graph: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The original skipped it without a word."""
    monkeypatch.setenv("RLX_DEVICE", wish)
    with caplog.at_level(logging.WARNING):
        assert resolve_device(graph) == CPU
    (record,) = caplog.records
    assert "RLX_DEVICE" in record.getMessage()
    assert Device(wish).display in record.getMessage()
    assert why in record.getMessage()


def test_a_denied_device_of_the_environment_is_skipped_with_a_warning(
    graph: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The policy beats the variable."""
    monkeypatch.setenv("RLX_DEVICE", "cuda")
    with caplog.at_level(logging.WARNING):
        assert resolve_device(graph, policy=DevicePolicy().with_deny(["cuda"])) == CPU
    assert "denied" in caplog.text


def test_a_malformed_device_of_the_environment_raises(graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo is an error, not an automatic choice."""
    monkeypatch.setenv("RLX_DEVICE", "cudda")
    with pytest.raises(DeviceParseError, match="RLX_DEVICE"):
        resolve_device(graph)


def test_a_hint_that_is_away_raises_with_reason_and_remedy(graph: Any) -> None:
    """What was named fails loudly."""
    with pytest.raises(DeviceUnavailableError) as caught:
        resolve_device(graph, "metal")
    assert (caught.value.reason, caught.value.remedy) == ("libfake.so is missing", "install libfake")


def test_a_hint_that_does_not_take_the_graph_raises_naming_the_node(graph: Any) -> None:
    """The report comes with the error."""
    with pytest.raises(LegalizeError, match="node 1 'erf'") as caught:
        resolve_device(graph, "gpu")
    assert not caught.value.report.compile_ready


@pytest.mark.parametrize(
    ("policy", "why"),
    [(DevicePolicy().with_deny(["cuda"]), "denied by the policy"), (DevicePolicy.only(["cpu"]), "allow list")],
)
def test_a_hint_that_the_policy_refuses_raises_naming_hint_policy_and_viable_devices(
    policy: DevicePolicy, why: str, graph: Any
) -> None:
    """The message says who asked, for what, why not, and what could run instead."""
    with pytest.raises(NoViableDeviceError) as caught:
        resolve_device(graph, "cuda", policy)
    text = str(caught.value)
    assert "hint" in text
    assert "CUDA" in text
    assert why in text
    assert text.endswith("graph 'chain': cpu. Change the hint or the policy.")


def test_a_hint_is_judged_strictly_unless_the_options_say_otherwise(graph: Any, machine: Any) -> None:
    """A device that was named must take every node by itself."""
    mixed = machine.chain("Cos", "Erf")
    with pytest.raises(LegalizeError):
        resolve_device(mixed, "gpu")
    assert resolve_device(mixed, "gpu", options=ASSISTED) == GPU


def test_a_test_provider_can_be_asked_for_by_name(graph: Any, machine: Any) -> None:
    """Only automatic choice leaves it alone."""
    machine.add("null", kernels=machine.kernels("Erf"), selectable=False)
    assert resolve_device(graph, "null") == Device("null")
    assert resolve_device(graph) == CPU


@pytest.mark.parametrize("hint", [None, "cpu", "cuda"])
def test_with_nothing_viable_resolving_raises(hint: str | None, graph: Any) -> None:
    """With a hint or without, a denied device is never the answer."""
    with pytest.raises(NoViableDeviceError):
        resolve_device(graph, hint, DevicePolicy().with_deny(Device.all()))


def test_a_chain_without_a_viable_device_raises_with_both_lists_and_reasons(graph: Any) -> None:
    """What was asked, what could run, and why each entry cannot; nothing outside the chain is taken."""
    with pytest.raises(NoViableDeviceError) as caught:
        resolve_device_chain(graph, ["metal", "gpu"])
    headline = str(caught.value).splitlines()[0]
    assert "metal, gpu" in headline
    assert headline.endswith("cuda, cpu")
    assert [device.label for device, _ in caught.value.blockers] == ["metal", "gpu"]


def test_an_empty_chain_raises(graph: Any) -> None:
    """There is nothing to resolve."""
    with pytest.raises(NoViableDeviceError, match=r"\(none\)"):
        resolve_device_chain(graph, [])


def test_fallback_returns_the_first_success_with_its_device(graph: Any) -> None:
    """The result comes with the device that gave it, and later devices are left alone."""
    called: list[Device] = []

    def work(device: Device) -> str:
        called.append(device)
        return f"ran on {device}"

    assert run_with_fallback(graph, None, ["cuda", "cpu"], work) == (CUDA, "ran on cuda")
    assert called == [CUDA]


def test_fallback_passes_over_what_is_not_viable_without_calling(graph: Any) -> None:
    """Away, unable and denied devices are not tried."""
    called: list[Device] = []
    policy = DevicePolicy().with_deny(["cuda"])
    device, _ = run_with_fallback(graph, policy, ["metal", "gpu", "cuda", "cpu"], called.append)
    assert (device, called) == (CPU, [CPU])


@pytest.mark.parametrize(
    "error",
    [
        EngineError("out of memory"),
        PlacementError("stray nodes"),
        LegalizeError("no kernel"),
        DeviceUnavailableError(CUDA, "device lost"),
        MemoryError("on the host"),
        type("Fail", (Exception,), {"__module__": "onnxruntime.capi.onnxruntime_pybind11_state"})("no kernel"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_on_a_device_is_an_attempt_and_the_next_one_is_tried(
    error: Exception, graph: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Compile and run failures, also those of the engine itself, fall through, and the log says so."""
    attempts: list[tuple[Device, str]] = []

    def work(device: Device) -> int:
        if device == CUDA:
            raise error
        return 7

    with caplog.at_level(logging.WARNING):
        assert run_with_fallback(graph, None, "cuda,cpu", work, attempts=attempts) == (CPU, 7)
    assert attempts == [(CUDA, str(error))]
    assert str(error) in caplog.text


def test_when_all_fail_every_attempt_is_listed_in_order(graph: Any) -> None:
    """Entries that are not viable and entries that failed are listed separately, as `label: reason`."""

    def work(device: Device) -> None:
        raise EngineError(f"{device} broke")

    with pytest.raises(DeviceFallbackError) as caught:
        run_with_fallback(graph, None, ["metal", "cuda", "cpu", "cuda"], work)
    assert [device for device, _ in caught.value.attempts] == [METAL, CUDA, CPU, CUDA]
    lines = str(caught.value).splitlines()
    assert lines[1].startswith("  metal: not viable under the policy: libfake")
    assert lines[2:] == ["  cuda: cuda broke", "  cpu: cpu broke", "  cuda: cuda broke"]


def test_an_empty_chain_is_one_attempt_of_the_cpu(graph: Any) -> None:
    """There is always something to report."""
    with pytest.raises(DeviceFallbackError) as caught:
        run_with_fallback(graph, None, [], lambda device: None)
    ((device, reason),) = caught.value.attempts
    assert device == CPU
    assert "empty" in reason


@pytest.mark.parametrize(
    "error",
    [
        KeyError("bug"),
        OSError("no file"),
        RuntimeError("of another library"),
        DeviceParseError("cudda", "no device"),
        GraphVerifyError("dangling"),
        IntegrityError("changed"),
        InputError("'x' is missing"),
        ParamError("'w' is unset"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_all_other_errors_end_the_call(error: Exception, graph: Any) -> None:
    """A programming mistake, or what is wrong on every device, is not an attempt."""
    called: list[Device] = []

    def work(device: Device) -> None:
        called.append(device)
        raise error

    with pytest.raises(type(error)) as caught:
        run_with_fallback(graph, None, ["cuda", "cpu"], work)
    assert caught.value is error
    assert called == [CUDA]


def test_a_device_that_a_chain_skips_is_logged(graph: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One record of level INFO with the reason."""
    with caplog.at_level(logging.INFO, "rlx_ort.selection"):
        assert run_with_fallback(graph, None, [METAL, CPU], lambda device: device)[0] == CPU
    (record,) = [record for record in caplog.records if "is skipped" in record.getMessage()]
    assert record.levelno == logging.INFO
    assert METAL.display in record.getMessage()
    assert "libfake.so is missing" in record.getMessage()
