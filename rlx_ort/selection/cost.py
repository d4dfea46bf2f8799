"""Predicted run times. One unit set everywhere: ns, GFLOP/s (which is FLOP per ns), bytes per ns.

A prediction is the round trip of an empty run, plus moving the graph's inputs and outputs, plus for each node its
launch and the longer of computing and moving memory. Nodes that the CPU takes for a device are priced on the CPU,
and each value that crosses between the two is priced as a copy.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from rlx_ort.device import Device
from rlx_ort.errors import NoViableDeviceError
from rlx_ort.ir.core import Node, Ref
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.op import element_count, type_bytes
from rlx_ort.ir.ops.leaf import Constant, Input, Param
from rlx_ort.ir.shape import Dim, Shape
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.base import CostProfile
from rlx_ort.selection.op_classes import CLASSES, OpClass
from rlx_ort.selection.workload import DEFAULT_DIM, Work

__all__ = [
    "DEFAULT_DIM",
    "BackendCostModel",
    "BasicCostModel",
    "ProfileCostModel",
    "completed",
    "estimate_graph_cost",
    "pick_best_device",
]


class BasicCostModel(Protocol):
    """The rates of a device: all that a cost model of your own must have.

    `device` may also be a method. A `BackendCostModel` is made of it where one is needed; see `completed`.
    """

    @property
    def device(self) -> Device:
        """The device it speaks for."""

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
    """What a device needs for its part of a run. Implementations may be asked from several threads."""

    @property
    def source(self) -> str:
        """Where its figures come from; `default` are shipped and not measured here."""

    @property
    def error(self) -> float:
        """The error to expect of a prediction, as a share of it."""

    def error_of(self, terms: Mapping[str, float]) -> float:
        """Return the error to expect of a prediction that is made of these terms, by kind of work, in ns."""

    def work_ns(self, work: Work) -> float:
        """Return the time of one piece of work with its launch, in ns."""

    def conv_gflops(self) -> float:
        """Return the sustained rate of f32 convolutions, in GFLOP/s."""

    def upload_ns(self, nbytes: int) -> float:
        """Return the time to bring one value from the host to the device, in ns."""

    def readback_ns(self, nbytes: int) -> float:
        """Return the time to bring one value from the device to the host, in ns."""


@dataclass(frozen=True, slots=True)
class ProfileCostModel:
    """A cost model made of one `CostProfile`, measured or shipped; its rates do not depend on the shape.

    Attributes:
        device: the device it speaks for.
        profile: the figures.
        threads: the threads the device computes with.
    """

    device: Device
    profile: CostProfile
    threads: int = 1

    @property
    def source(self) -> str:
        """The profile's source."""
        return self.profile.source

    @property
    def error(self) -> float:
        """One: figures of another machine are right to a factor of two at best."""
        return 1.0

    def error_of(self, terms: Mapping[str, float]) -> float:
        """Return the error of everything, whatever it is made of."""
        return self.error

    def work_ns(self, work: Work) -> float:
        """Return the launch and the longer of computing and moving memory."""
        if work.kind in ("view", "fused"):
            return 0.0
        if work.kind == "gemm":
            m, k, n = work.size
            rate = self.sgemm_gflops(m, k, n)
        elif work.kind in _CONVOLUTIONS:
            rate = self.conv_gflops()
        else:
            rate = self.sgemm_gflops(512, 512, 512)
        once_ns = max(_over(work.flops, rate), _over(work.nbytes, self.memory_bw()))
        return (once_ns + self.dispatch_overhead_ns()) * work.times

    def sgemm_gflops(self, m: int, k: int, n: int) -> float:
        """Return the profile's rate, whatever the shape."""
        return self.profile.gemm_gflops

    def conv_gflops(self) -> float:
        """Return the profile's rate of convolutions."""
        return self.profile.conv_gflops

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

    What the rates leave out is assumed: convolutions run at the rate of a product of size 512, transfers are free.
    """
    if hasattr(model, "work_ns"):
        return cast(BackendCostModel, model)
    return _GivenCostModel(model)


class _GivenCostModel(ProfileCostModel):
    """A `ProfileCostModel` with the rates of somebody's model, which may depend on the shape."""

    _model: BasicCostModel

    def __init__(self, model: BasicCostModel) -> None:
        device = model.device() if callable(model.device) else model.device
        conv, nothing = model.sgemm_gflops(512, 512, 512), 0.0
        rates = (model.memory_bw(), model.dispatch_overhead_ns(), model.roundtrip_overhead_ns())
        profile = CostProfile(conv, conv, *rates, nothing, nothing, source=f"given: {type(model).__name__}")
        super().__init__(device, profile, model.num_threads())
        object.__setattr__(self, "_model", model)

    def sgemm_gflops(self, m: int, k: int, n: int) -> float:
        """Return the model's rate of the product."""
        return self._model.sgemm_gflops(m, k, n)


_CONVOLUTIONS = ("conv", "pointwise", "depthwise")


def estimate_graph_cost(
    graph: Graph,
    model: BasicCostModel,
    *,
    dims: Mapping[str, int] | None = None,
    cpu_nodes: Collection[int] = (),
    cpu_model: BasicCostModel | None = None,
) -> float:
    """Return the predicted time of one run, in ns.

    Args:
        graph: the graph; dead nodes count, fusion does not.
        model: the device's figures; its rates are enough, see `completed`.
        dims: sizes of named dims; a dimension that has none counts as `DEFAULT_DIM`.
        cpu_nodes: ids of the nodes that the CPU takes over; they count as the device's own without a `cpu_model`.
        cpu_model: the figures for those nodes.
    """
    sizes = dict(dims or {})
    model, cpu_model = completed(model), None if cpu_model is None else completed(cpu_model)
    on_cpu = frozenset(cpu_nodes) if cpu_model is not None else frozenset()
    total = model.roundtrip_overhead_ns()
    for value in graph.outputs:
        if value.ref.node not in on_cpu:
            total += model.readback_ns(type_bytes(_sized(value.type, sizes)))
    crossed: set[tuple[Ref, bool]] = set()
    for node in graph.nodes:
        here = node.id in on_cpu
        total += _node_ns(graph, node, cpu_model if here and cpu_model is not None else model, sizes)
        for ref in dict.fromkeys(ref for ref in node.inputs if ref is not None):
            total += _crossing_ns(graph, ref, here, on_cpu, crossed, model, sizes)
    return total


def pick_best_device(
    graph: Graph, models: Sequence[BasicCostModel], *, dims: Mapping[str, int] | None = None
) -> Device:
    """Return the device with the smallest predicted time; of equals, the earlier one.

    Raises:
        NoViableDeviceError: there is no model, or none predicts a finite time.
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


def _crossing_ns(
    graph: Graph,
    ref: Ref,
    to_cpu: bool,
    on_cpu: frozenset[int],
    crossed: set[tuple[Ref, bool]],
    model: BackendCostModel,
    sizes: Mapping[str, int],
) -> float:
    """Return the time to bring a value to where it is read; the first reader on a side pays for all of them."""
    producer = graph.nodes[ref.node]
    if isinstance(producer.op, (Param, Constant)):
        return 0.0  # resident since the session was opened
    from_cpu = isinstance(producer.op, Input) or producer.id in on_cpu
    if from_cpu == to_cpu or (ref, to_cpu) in crossed:
        return 0.0
    crossed.add((ref, to_cpu))
    nbytes = type_bytes(_sized(producer.types[ref.output], sizes))
    return model.readback_ns(nbytes) if to_cpu else model.upload_ns(nbytes)


def _node_ns(graph: Graph, node: Node, model: BackendCostModel, sizes: Mapping[str, int]) -> float:
    if node.op.is_leaf:
        return 0.0
    inputs = [None if ref is None else _sized(graph.nodes[ref.node].types[ref.output], sizes) for ref in node.inputs]
    outputs = [_sized(kind, sizes) for kind in node.types]
    bodies_ns = sum(_node_ns(body, inner, model, sizes) for body in node.op.bodies() for inner in body.nodes)
    return model.work_ns(_work_of(node, inputs, outputs)) + bodies_ns


def _work_of(node: Node, inputs: Sequence[ValueType | None], outputs: Sequence[ValueType]) -> Work:
    """Return an IR node's work, told from its operations and bytes alone."""
    flops = node.op.flops(inputs, outputs)
    nbytes = node.op.bytes_moved(inputs, outputs)
    kind = getattr(node.op, "op_type", node.op.kind)
    if kind.startswith("Conv"):
        pixels = max(element_count(outputs[0]) // max(_dim(outputs[0], 1), 1), 1)
        channels = max(round(math.sqrt(flops / (18 * pixels))), 1)
        return Work("conv", "Conv", (pixels, channels), flops, nbytes)
    written = sum(map(element_count, outputs))
    if flops <= 16 * written:
        like = CLASSES.get(kind, OpClass("op", "Add"))
        return Work("op", like.like if like.kind == "op" else "Add", (max(written, 1),), flops, nbytes)
    n = _last(outputs[0]) if outputs else 1
    k = _last(inputs[0]) if inputs else 1
    # What is left of 2mkn after k and n holds the rows and the batch together.
    return Work("gemm", "MatMul", (max(flops // (2 * k * n), 1), k, n), flops, nbytes)


def _dim(kind: ValueType, axis: int) -> int:
    if not isinstance(kind, TensorType) or kind.shape is None or len(kind.shape) <= axis:
        return 1
    dim = kind.shape[axis]
    return dim if isinstance(dim, int) else DEFAULT_DIM


def _last(kind: ValueType | None) -> int:
    if not isinstance(kind, TensorType) or not kind.shape:
        return 1
    dim = kind.shape[-1]
    return max(dim, 1) if isinstance(dim, int) else DEFAULT_DIM


def _sized(kind: ValueType, sizes: Mapping[str, int]) -> ValueType:
    if not isinstance(kind, TensorType) or kind.shape is None or kind.shape.is_static:
        return kind
    return TensorType(kind.dtype, Shape(_size(dim, sizes) for dim in kind.shape))


def _size(dim: Dim, sizes: Mapping[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    return sizes.get(dim, DEFAULT_DIM) if dim is not None else DEFAULT_DIM


def _over(amount: float, rate: float) -> float:
    """Return amount / rate; a rate of 0 stands for no such cost, as copies have none on the CPU."""
    return amount / rate if rate else 0.0
