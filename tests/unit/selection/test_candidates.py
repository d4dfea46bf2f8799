"""Viable devices, the automatic choice, and the report with its blockers."""

import math
from typing import Any

import pytest

from rlx_ort import Device, DeviceCandidate, DevicePolicy, Graph, device_report, devices_for, fastest_device_for, rank
from rlx_ort.converters.to_onnx import exporter
from rlx_ort.errors import NoViableDeviceError
from rlx_ort.options.compile_options import CompileOptions, PlacementRule

CPU, CUDA, GPU, METAL = Device.CPU, Device.CUDA, Device.GPU, Device.METAL
STRICT = CompileOptions(placement=PlacementRule.STRICT)


def add(machine: Any, kind: str, roundtrip_ns: float | None = None, **given: Any) -> Any:
    """Add a device that takes Erf and whose every run is predicted to take about `roundtrip_ns`."""
    if roundtrip_ns is not None:
        given["profile"] = machine.profile(gemm_gflops=1e12, memory_bytes_per_ns=1e12, roundtrip_ns=roundtrip_ns)
    return machine.add(kind, **({"kernels": machine.kernels("Erf")} | given))


def rows(report: list[DeviceCandidate]) -> dict[str, DeviceCandidate]:
    """Return a report by label."""
    return {row.label: row for row in report}


def test_viable_devices_come_by_priority_not_by_the_order_of_the_table(machine: Any) -> None:
    """`devices_for` sorts as the default policy does."""
    for kind in ("cpu", "metal", "cuda"):
        add(machine, kind)
    assert devices_for(machine.chain("Erf")) == [CUDA, METAL, CPU]


def test_only_devices_that_are_here_and_take_the_graph_are_viable(machine: Any) -> None:
    """Away and unable are both out."""
    add(machine, "cuda", answer=machine.away)
    add(machine, "gpu", kernels=machine.kernels("Cos"))
    add(machine, "cpu")
    assert devices_for(machine.chain("Erf")) == [CPU]


def test_the_policy_filters_and_orders_viable_devices(machine: Any) -> None:
    """Denied devices go, preferred ones come first."""
    for kind in ("cpu", "metal", "cuda"):
        add(machine, kind)
    policy = DevicePolicy().with_deny(["metal"]).with_prefer(["cpu"])
    assert devices_for(machine.chain("Erf"), policy) == [CPU, CUDA]


def test_a_denied_device_is_not_even_probed(machine: Any) -> None:
    """Choosing does not touch what must not be used."""
    provider = add(machine, "cuda")
    add(machine, "cpu")
    devices_for(machine.chain("Erf"), DevicePolicy().with_deny(["cuda"]))
    assert provider.probes == 0


def test_a_test_provider_is_blocked_in_the_ranking_unless_it_is_named(machine: Any) -> None:
    """With the reason."""
    add(machine, "null", selectable=False)
    graph = machine.chain("Erf")
    row = rows(rank(graph))["null"]
    assert row.blocker == "runs only when it is named"
    assert rank(graph, policy=DevicePolicy.only("null"))[0].blocker is None


def test_the_cpu_may_help_in_an_automatic_choice_unless_it_is_strict(machine: Any) -> None:
    """Assisted is the rule when nobody named a device."""
    add(machine, "gpu")
    add(machine, "cpu", kernels=machine.kernels("Erf", "Cos"))
    graph = machine.chain("Erf", "Cos")
    assert devices_for(graph) == [GPU, CPU]
    assert devices_for(graph, options=STRICT) == [CPU]


NO_TIMES = {"cpu": None, "metal": None, "cuda": None}
FASTEST: dict[str, tuple[dict[str, float | None], list[str], str]] = {
    "by the time and not by priority": ({"cuda": 35_000.0, "cpu": 4_000.0}, [], "cpu"),
    "of whatever kind it is": ({"vulkan": 10.0, "cpu": 100.0}, [], "vulkan"),
    "the best without a preference": ({"cuda": 100.0, "cpu": 104.0}, [], "cuda"),
    "a preferred one within five percent of the best": ({"cuda": 100.0, "cpu": 104.0}, ["cpu"], "cpu"),
    "a known time before an unknown one": ({"cuda": None, "cpu": 100.0}, [], "cpu"),
    "a number before none": ({"cuda": math.nan, "cpu": 100.0}, [], "cpu"),
    "by priority where times are equal": ({"cpu": 100.0, "metal": 100.0}, [], "metal"),
    "by priority where no time is known": (NO_TIMES, [], "cuda"),
    "by preference where no time is known": (NO_TIMES, ["metal"], "metal"),
}


@pytest.mark.parametrize(("times_ns", "prefer", "fastest"), FASTEST.values(), ids=FASTEST)
def test_the_fastest_device_has_the_smallest_prediction(
    machine: Any, times_ns: dict[str, float | None], prefer: list[str], fastest: str
) -> None:
    """Every provider with a profile is compared, not a fixed list of kinds as in the original."""
    for kind, time_ns in times_ns.items():
        add(machine, kind, time_ns)
    assert fastest_device_for(machine.chain("Erf"), DevicePolicy(prefer=prefer)).label == fastest


def test_with_nothing_viable_the_fastest_raises_with_each_blocker(machine: Any) -> None:
    """The original answered CPU even where it was denied."""
    add(machine, "cuda", answer=machine.away)
    add(machine, "gpu", kernels=machine.kernels("Cos"))
    add(machine, "cpu")
    with pytest.raises(NoViableDeviceError) as caught:
        fastest_device_for(machine.chain("Erf"), DevicePolicy().with_deny(["cpu"]))
    blockers = {device.label: reason for device, reason in caught.value.blockers}
    assert blockers["cuda"] == "libfake.so is missing; install libfake"
    assert "none of the graph's nodes" in blockers["gpu"]
    assert "denied" in blockers["cpu"]
    assert set(blockers) == {device.label for device in Device.all()}


def test_the_report_has_a_row_for_each_known_device(machine: Any) -> None:
    """Rows come in the order of the probe set."""
    add(machine, "cpu")
    assert [row.device for row in device_report(machine.chain("Erf"))] == Device.all()


def test_the_report_follows_the_allow_list_as_given(machine: Any) -> None:
    """Order and duplicates of the list stay."""
    add(machine, "cpu")
    report = device_report(machine.chain("Erf"), DevicePolicy.only(["cuda", "cpu", "cuda"]))
    assert [row.label for row in report] == ["cuda", "cpu", "cuda"]


def test_a_viable_device_has_no_blocker(machine: Any) -> None:
    """Everything a row says of a device that can be chosen."""
    add(machine, "cpu", 100.0)
    row = rows(device_report(machine.chain("Erf")))["cpu"]
    assert (row.available, row.registered, row.supports_graph, row.blocker) == (True, True, True, None)
    assert (row.hardware, row.driver, row.profile_source) == ("Fake 1", "1.2", "default")
    assert row.predicted_ns == pytest.approx(100.0)
    assert "run_slots" in row.capabilities


AWAY = "libfake.so is missing; install libfake"
BLOCKED: dict[str, tuple[str, dict[str, Any], tuple[bool, bool], str]] = {
    "away": ("cuda", {"away": True}, (True, False), AWAY),
    "served by nothing": ("tpu", {}, (False, False), "no ONNX Runtime execution provider"),
    "of a provider that only explains": (
        "mlx",
        {"away": True, "ep_name": "", "selectable": False},
        (False, False),
        AWAY,
    ),
    "without a kernel": (
        "webgpu",
        {"kernels": "Cos"},
        (True, False),
        "first unsupported op: node 1 'erf' (Erf): WebGPU has no kernel for ai.onnx::Erf-21 (f32)",
    ),
    "denied": ("metal", {"kernels": "Erf"}, (True, True), "denied by the policy"),
}


@pytest.mark.parametrize(("label", "given", "facts", "blocker"), BLOCKED.values(), ids=BLOCKED)
def test_a_device_that_cannot_be_chosen_has_a_blocker(
    machine: Any, label: str, given: dict[str, Any], facts: tuple[bool, bool], blocker: str
) -> None:
    """Reason and remedy of the probe, the provider's own words, the user's node, or the policy; no recommendation."""
    options = dict(given)
    if options:
        answer = {"answer": machine.away} if options.pop("away", False) else {}
        machine.add(label, kernels=machine.kernels(options.pop("kernels", "Erf")), **answer, **options)
    row = rows(device_report(machine.chain("Erf"), DevicePolicy().with_deny(["metal"])))[label]
    assert (row.registered, row.supports_graph) == facts
    assert blocker in str(row.blocker)
    assert (row.recommended, row.predicted_ns) == (False, None)


def test_a_graph_that_the_cpu_would_run_alone_has_a_blocker(machine: Any) -> None:
    """The original had none when no single op was to blame."""
    add(machine, "gpu")
    add(machine, "cpu", kernels=machine.kernels("Cos"))
    row = rows(device_report(machine.chain("Cos")))["gpu"]
    assert not row.supports_graph
    assert row.blocker


def test_blockers_have_an_order(machine: Any) -> None:
    """Away comes before unsupported, unsupported before denied."""
    add(machine, "cuda", answer=machine.away, kernels=machine.kernels("Cos"))
    add(machine, "gpu", kernels=machine.kernels("Cos"))
    report = rows(device_report(machine.chain("Erf"), DevicePolicy().with_deny(["cuda", "gpu"])))
    assert "libfake" in str(report["cuda"].blocker)
    assert "first unsupported op" in str(report["gpu"].blocker)


def test_the_automatic_choice_is_recommended_and_no_other(machine: Any) -> None:
    """One row is recommended."""
    add(machine, "cuda", 35_000.0)
    add(machine, "cpu", 4_000.0)
    report = device_report(machine.chain("Erf"))
    assert [row.label for row in report if row.recommended] == ["cpu"]


def test_the_report_counts_the_nodes_that_the_cpu_would_take(machine: Any) -> None:
    """Help is visible before anything is compiled."""
    add(machine, "gpu")
    add(machine, "cpu", kernels=machine.kernels("Erf", "Cos"))
    report = rows(device_report(machine.chain("Erf", "Cos", "Erf")))
    assert (report["gpu"].cpu_nodes, report["cpu"].cpu_nodes) == (1, 0)


def test_a_row_names_the_dims_whose_size_was_assumed(machine: Any) -> None:
    """Named dims by name, others by their place; a dim that the options fix is known."""
    machine.add("cpu", kernels=machine.kernels("Erf"), profile=machine.profile())
    graph = machine.chain("Erf", shape=("batch", "width", None, 3))
    (row,) = device_report(graph, DevicePolicy.only(["cpu"]), CompileOptions(dims={"width": 7}))
    assert row.assumed_dims == ("batch", "x[2]")


def test_a_second_report_neither_probes_nor_exports(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warmed process answers from memory."""
    providers = [add(machine, "cuda", 1.0), add(machine, "cpu", 1.0)]
    graph = machine.chain("Erf")
    first = device_report(graph)

    def refuse(graph: Graph, options: CompileOptions | None = None) -> Any:
        raise AssertionError("exported again")

    monkeypatch.setattr(exporter, "export_model", refuse)
    assert device_report(graph) == first
    assert [provider.probes for provider in providers] == [1, 1]


def test_names_of_one_device_are_chosen_once(machine: Any) -> None:
    """The first by preference and priority stands for the others, which run when they are named."""
    given = {"kernels": machine.kernels("Erf"), "profile": machine.profile()}
    machine.add("gpu", "webgpu", "vulkan", **given)
    graph = machine.chain("Erf")
    assert devices_for(graph) == [GPU]
    assert [devices_for(graph, DevicePolicy().with_prefer([name])) for name in ("vulkan", "webgpu")] == [
        [Device.VULKAN],
        [Device.WEBGPU],
    ]
    assert devices_for(graph, DevicePolicy.only("vulkan,webgpu")) == [Device.VULKAN, Device.WEBGPU]
    blocker = rows(device_report(graph))["vulkan"].blocker
    assert blocker is not None
    assert "the same device as gpu" in blocker
