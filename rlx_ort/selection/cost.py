"""Cost models, and the predicted time of an exported model with its parts. Units: ns, GFLOP/s, bytes per ns.

A prediction is the round trip of an empty run, plus the transfers of inputs and outputs, plus the price of each node.
Nodes that run on the CPU for a device are priced there, and each value that crosses between the two as a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from rlx_ort.calibration.features import DEFAULT_DIM, Kernel, Workload, workload_of
from rlx_ort.calibration.model import Price
from rlx_ort.converters.to_onnx.exporter import Draft
from rlx_ort.device import Device
from rlx_ort.errors import NoViableDeviceError
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers import registry
from rlx_ort.providers.base import CostProfile, figure
from rlx_ort.selection.folding import sized_outline
from rlx_ort.selection.graph_cache import open_dims
from rlx_ort.selection.support import draft_for

__all__ = [
    "BackendCostModel", "BasicCostModel", "DEFAULT_DIM", "Estimate", "ProfileCostModel", "Term", "completed",
    "estimate_graph_cost", "estimate_workload", "pick_best_device", "sized_workload", "total_ns",
]  # fmt: skip


class BasicCostModel(Protocol):
    """The rates of a device: all that a cost model of your own must have.

    `device` may also be a method. It is converted to a `BackendCostModel` where one is needed; see `completed`.
    """

    @property
    def device(self) -> Device:
        """The device of the figures."""

    def sgemm_gflops(self, m: int, k: int, n: int) -> float:
        """Return the sustained rate of an f32 product of (m, k) and (k, n), in GFLOP/s."""

    def memory_bw(self) -> float:
        """Return the device's memory bandwidth, in bytes per ns."""

    def dispatch_overhead_ns(self) -> float:
        """Return the time to start one kernel, in ns."""

    def roundtrip_overhead_ns(self) -> float:
        """Return the time of a run that computes nothing, in ns."""

    def num_threads(self) -> int:
        """Return the threads the device computes with; 1 for accelerators. Predictions do not use it."""


class BackendCostModel(BasicCostModel, Protocol):
    """Prices a device's part of a run. Implementations may be asked from several threads."""

    @property
    def source(self) -> str:
        """The source of its figures; `default` are shipped and not measured here."""

    def error_of(self, ns_by_how: Mapping[str, float]) -> float:
        """Return the error to expect of a prediction, as a share of it, from how its parts were found."""

    def price(self, kernel: Kernel) -> Price:
        """Return the time of one node with its launch, in ns, and how it was found."""

    def upload_ns(self, nbytes: int) -> float:
        """Return the time to bring one value from the host to the device, in ns."""

    def readback_ns(self, nbytes: int) -> float:
        """Return the time to bring one value from the device to the host, in ns."""


@dataclass(frozen=True, slots=True)
class ProfileCostModel:
    """A cost model with the figures of one `CostProfile`, measured or shipped.

    Attributes:
        device: the device of the figures.
        profile: the figures.
        threads: the threads the device computes with.
        gemm: the rate in GFLOP/s of a product of (m, k) and (k, n); without, the profile's for every shape.
    """

    device: Device
    profile: CostProfile
    threads: int = 1
    gemm: Callable[[int, int, int], float] | None = None

    @property
    def source(self) -> str:
        """The profile's source."""
        return self.profile.source

    def error_of(self, ns_by_how: Mapping[str, float]) -> float:
        """Return one: figures of another machine are right to a factor of two at best."""
        return 1.0

    def price(self, kernel: Kernel) -> Price:
        """Return the launch and the longer of computing and moving memory; nothing for a view."""
        if kernel.name == "View":
            return Price(0.0, "assumed")
        if kernel.name == "MatMul":
            rate = self.sgemm_gflops(*kernel.size)
        elif kernel.name == "BatchedMatMul":
            batch, m, k, n = kernel.size
            rate = self.sgemm_gflops(batch * m, k, n)
        elif kernel.name in ("Conv3x3", "Conv1x1", "DepthwiseConv"):
            rate = self.profile.conv_gflops
        else:
            rate = self.sgemm_gflops(512, 512, 512)
        once_ns = max(_over(kernel.flops, rate), _over(kernel.nbytes, self.memory_bw()))
        return Price((once_ns + self.dispatch_overhead_ns()) * kernel.times, "assumed")

    def sgemm_gflops(self, m: int, k: int, n: int) -> float:
        """Return `gemm` of the shape, or without it the profile's rate."""
        return self.profile.gemm_gflops if self.gemm is None else self.gemm(m, k, n)

    def memory_bw(self) -> float:
        """Return the profile's memory bandwidth."""
        return self.profile.memory_bytes_per_ns

    def dispatch_overhead_ns(self) -> float:
        """Return the profile's time to start a kernel."""
        return self.profile.dispatch_ns

    def roundtrip_overhead_ns(self) -> float:
        """Return the profile's time of an empty run."""
        return self.profile.roundtrip_ns

    def upload_ns(self, nbytes: int) -> float:
        """Return latency plus bytes over bandwidth."""
        return self.profile.upload_latency_ns + _over(nbytes, self.profile.upload_bytes_per_ns)

    def readback_ns(self, nbytes: int) -> float:
        """Return latency plus bytes over bandwidth."""
        return self.profile.readback_latency_ns + _over(nbytes, self.profile.readback_bytes_per_ns)

    def num_threads(self) -> int:
        """Return the thread count."""
        return self.threads


def completed(model: BasicCostModel) -> BackendCostModel:
    """Return a model with everything that predictions ask for; the rates alone make a profile.

    Other rates are assumed: convolutions run at the rate of a product of size 512, transfers are free.

    Raises:
        CalibrationError: a rate is not above 0, or a time is below.
    """
    if getattr(type(model), "price", None) not in (None, BackendCostModel.price):  # not the protocol's own
        return cast(BackendCostModel, model)
    device = model.device() if callable(model.device) else model.device
    whose = f"the cost model {type(model).__name__} of {device.display}"

    def gflops(m: int, k: int, n: int) -> float:
        return figure(whose, "sgemm_gflops", model.sgemm_gflops(m, k, n), is_rate=True)

    conv, nothing = gflops(512, 512, 512), 0.0
    bandwidth = figure(whose, "memory_bw", model.memory_bw(), is_rate=True)
    dispatch_ns = figure(whose, "dispatch_overhead_ns", model.dispatch_overhead_ns())
    roundtrip_ns = figure(whose, "roundtrip_overhead_ns", model.roundtrip_overhead_ns())
    source = f"given: {type(model).__name__}"
    profile = CostProfile(conv, conv, bandwidth, dispatch_ns, roundtrip_ns, nothing, nothing, source=source)
    return ProfileCostModel(device, profile, model.num_threads(), gflops)


def _over(amount: float, rate: float) -> float:
    """Return amount / rate; a rate of 0 means no cost, such as copies on the CPU."""
    return amount / rate if rate else 0.0


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a predicted time.

    `name` is the part of the run: `round trip`, `inputs`, `outputs`, `copies`, or a node. `kind` is `overhead`,
    `transfer`, or the row of the table that a node is priced by, or its operator. The time is the sum of `count` parts
    of the kind. `how` is `measured`, `interpolated`, `extrapolated`, or `assumed`; empty for a mixture of these.
    """

    name: str
    kind: str
    ns: float
    count: int = 1
    how: str = "measured"


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted time of one run, and its parts in the order of the run.

    `source` is the source of the figures, and `error` the expected error as a share of the total. `assumed` lists the
    dims whose size was not given.
    """

    device: Device
    total_ns: float
    terms: tuple[Term, ...] = field(repr=False)
    source: str
    error: float
    assumed: tuple[str, ...] = ()

    def explain(self, top: int = 5) -> list[Term]:
        """Return the parts by kind of work, the largest first; the rest beyond `top` as one part."""
        sums: dict[tuple[str, str, str], list[float]] = {}
        for term in self.terms:
            name = term.name if term.kind in ("overhead", "transfer") else term.kind
            entry = sums.setdefault((name, term.kind, term.how), [0.0, 0])
            entry[0] += term.ns
            entry[1] += term.count
        ordered = sorted(sums.items(), key=lambda item: -item[1][0])
        parts = [Term(name, kind, ns, int(count), how) for (name, kind, how), (ns, count) in ordered]
        rest = parts[top:]
        if not rest:
            return parts
        return [*parts[:top], Term("everything else", "rest", sum(part.ns for part in rest), len(rest), "")]


def estimate_workload(
    workload: Workload,
    model: BackendCostModel,
    *,
    cpu_nodes: Collection[int] = (),
    cpu_model: BackendCostModel | None = None,
) -> Estimate:
    """Return the predicted time of one run with its parts.

    `cpu_nodes` are ids of the user's nodes that the CPU takes over; without a `cpu_model` they count as the device's
    own.
    """
    on_cpu = frozenset(cpu_nodes) if cpu_model is not None else frozenset()
    terms = [Term("round trip", "overhead", model.roundtrip_overhead_ns())]
    for node, kernel in zip(workload.nodes, workload.kernels, strict=True):
        if kernel is not None:
            price = (cpu_model if cpu_model is not None and node.origin in on_cpu else model).price(kernel)
            how = "assumed" if kernel.guessed else price.how
            terms.append(Term(node.name, kernel.name.partition("-")[0], price.ns, 1, how))
    terms += _transfers(workload, model, on_cpu)
    by_how: dict[str, float] = {}
    for term in terms:
        by_how[term.how] = by_how.get(term.how, 0.0) + term.ns
    total = sum(by_how.values())
    return Estimate(model.device, total, tuple(terms), model.source, model.error_of(by_how), workload.assumed)


def total_ns(workload: Workload, model: BackendCostModel) -> float:
    """Return the predicted time of one run that is wholly on the device, in ns: the sum without its parts."""
    total = model.roundtrip_overhead_ns()
    total += sum(map(model.upload_ns, workload.inputs.values()))
    total += sum(map(model.readback_ns, workload.outputs.values()))
    return total + sum(model.price(kernel).ns * count for kernel, count in workload.counts.items())


def estimate_graph_cost(
    graph: Graph,
    model: BasicCostModel,
    *,
    dims: Mapping[str, int] | None = None,
    cpu_nodes: Collection[int] = (),
    cpu_model: BasicCostModel | None = None,
) -> float:
    """Return the predicted time of one run, in ns; infinity for a graph that has no ONNX form.

    Exports the graph as the device's provider would get it, which is remembered. Of a graph without outputs, every node
    counts.

    Args:
        graph: the graph.
        model: the device's figures; its rates are enough, see `completed`.
        dims: sizes of named dims; a dimension that has none counts as `DEFAULT_DIM`.
        cpu_nodes: ids of the nodes that the CPU takes over; they count as the device's own without a `cpu_model`.
        cpu_model: the figures for those nodes.

    Raises:
        GraphVerifyError: the graph is not valid, or has no nodes.
        CalibrationError: a figure of a cost model is no rate or no time.
    """
    model, cpu_model = completed(model), None if cpu_model is None else completed(cpu_model)
    providers = registry.default_registry()
    provider = providers.for_device(model.device) or providers.for_device(Device.CPU)
    draft = None if provider is None else draft_for(provider, graph, CompileOptions().on(model.device))
    if draft is None:
        return math.inf
    workload = sized_workload(draft, graph, dims or {})
    return estimate_workload(workload, model, cpu_nodes=cpu_nodes, cpu_model=cpu_model).total_ns


def sized_workload(draft: Draft, graph: Graph, dims: Mapping[str, int]) -> Workload:
    """Return the work of a graph's model for these sizes of the inputs' dims.

    All other sizes follow from those, as in `sized_outline`, which has the cost. A dim of an input that has no size
    counts as `DEFAULT_DIM`.
    """
    assumed = open_dims(graph, dims)
    sizes = {**dims, **dict.fromkeys(assumed, DEFAULT_DIM)}
    return replace(workload_of(sized_outline(draft, graph.weights, sizes), sizes), assumed=assumed)


def pick_best_device(
    graph: Graph, models: Sequence[BasicCostModel], *, dims: Mapping[str, int] | None = None
) -> Device:
    """Return the device with the smallest predicted time; of equals, the earlier one.

    Raises:
        NoViableDeviceError: there is no model, or none predicts a finite time.
        GraphVerifyError: the graph is not valid, or has no nodes.
        CalibrationError: a figure of a cost model is no rate or no time.
    """
    best: Device | None = None
    best_ns = math.inf
    models = [completed(model) for model in models]
    for model in models:
        predicted_ns = estimate_graph_cost(graph, model, dims=dims)
        if predicted_ns < best_ns:  # false for NaN as well
            best, best_ns = model.device, predicted_ns
    if best is None:
        raise NoViableDeviceError(
            f"no device can be predicted for graph {graph.name!r}:",
            [(model.device, "its cost model gives no finite time") for model in models],
        )
    return best


def _transfers(workload: Workload, model: BackendCostModel, on_cpu: frozenset[int]) -> list[Term]:
    """Return the times of inputs, outputs, and values that cross because the CPU takes some nodes."""
    side: dict[str, bool] = dict.fromkeys(workload.inputs, True)  # name -> whether it is in the host's memory
    nbytes = {**workload.inputs, **workload.nbytes}
    inputs, copies = list[float](), list[float]()
    crossed: set[tuple[str, bool]] = set()
    for node, kernel in zip(workload.nodes, workload.kernels, strict=True):
        if kernel is None:
            continue
        here = node.origin in on_cpu
        for name in node.input_names:
            if name not in side or side[name] == here or (name, here) in crossed:
                continue
            crossed.add((name, here))
            crossing = inputs if name in workload.inputs else copies
            crossing.append(model.readback_ns(nbytes[name]) if here else model.upload_ns(nbytes[name]))
        side.update(dict.fromkeys(node.output_names, here))
    outputs = [model.readback_ns(count) for name, count in workload.outputs.items() if not side.get(name, False)]
    parts = {"inputs": inputs, "outputs": outputs, **({"copies": copies} if copies else {})}
    return [Term(name, "transfer", sum(times), len(times)) for name, times in parts.items()]
