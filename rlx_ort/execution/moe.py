"""Mixtures of experts as sessions get them: with outputs that tell what the routers picked, and experts on the host.

A product by experts, some of which are not resident, becomes two: one on the device with the weights of the resident
experts, and one on the host with the others; each row takes the result of the one that has its expert. Nodes of the
second carry `HOST_MARKER` in their names, by which ONNX Runtime keeps them, and so their weights, on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Node, Ref, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.dequant import DequantGroupedMatMul
from rlx_ort.ir.ops.leaf import Constant, Param
from rlx_ort.ir.ops.moe import GroupedMatMul
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.ops.reduce import TopK
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType

__all__ = [
    "HOST_MARKER",
    "Experts",
    "MoeGraph",
    "account",
    "expert_nodes",
    "masks_of_products",
    "rewritten",
    "router_picks",
    "taken",
]

HOST_MARKER = "@moe-host"
"""Part of the names of the nodes that run on the host."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Experts:
    """The experts of a parameter that another one, made from it, holds."""

    param: str
    experts: tuple[int, ...]
    of: int


@dataclass
class MoeGraph:
    """A graph as sessions get it.

    Attributes:
        graph: the graph.
        picks: names of the hidden outputs with the places of each router's TopK, in order.
        routed: names of the hidden outputs with the experts of the rows of each product, in order.
        experts: new parameter -> what it holds of which one of the user's graph.
        on_host: whether some nodes belong on the host.
    """

    graph: Graph
    picks: tuple[str, ...] = ()
    routed: tuple[str, ...] = ()
    experts: dict[str, Experts] = field(default_factory=dict)
    on_host: bool = False


def expert_nodes(graph: Graph) -> list[Node]:
    """Return the products by experts, in order; those in bodies are not among them."""
    return [node for node in graph.nodes if isinstance(node.op, (GroupedMatMul, DequantGroupedMatMul))]


def router_picks(graph: Graph, num_experts: int) -> list[Ref]:
    """Return the places that each TopK over exactly that many elements finds, in order; bodies are not looked into."""
    found = []
    for node in graph.nodes:
        if isinstance(node.op, TopK):
            axis, output = -1, 0
        elif isinstance(node.op, OnnxNode) and (node.op.domain, node.op.op_type) == ("", "TopK"):
            given = node.op.attributes.get("axis", -1)
            axis, output = given if isinstance(given, int) else -1, 1
        else:
            continue
        ref = node.inputs[0]
        kind = None if ref is None else graph.nodes[ref.node].types[ref.output]
        shape = kind.shape if isinstance(kind, TensorType) else None
        if shape is not None and -shape.rank <= axis < shape.rank and shape[axis] == num_experts:
            found.append(Ref(node.id, output))
    return found


def rewritten(graph: Graph, capture: int | None, residency: Sequence[Mask] | None, split: bool) -> MoeGraph:
    """Return a graph with hidden outputs and, if `split`, the experts that are not resident on the host.

    Args:
        graph: the graph; it stays as it is.
        capture: the number of experts by which routers are known, None to capture nothing.
        residency: for each product by experts the mask of its resident ones; None for no accounts of them.
        split: whether experts that are not resident are to be on the host.

    Raises:
        GraphVerifyError: the weight of experts that are to be on the host is neither a parameter nor a constant.
    """
    made = MoeGraph(Graph(graph.name, metadata=dict(graph.metadata), doc=graph.doc))
    made.graph.weights = dict(graph.weights)
    masks = dict(zip((node.id for node in expert_nodes(graph)), residency or (), strict=False)) if split else {}
    values: dict[Ref, Value] = {}
    for node in graph.nodes:
        inputs = [None if ref is None else values[ref] for ref in node.inputs]
        mask = masks.get(node.id)
        if mask is not None and not mask.all():
            made.on_host = True
            results: tuple[Value, ...] = (_Split(made, graph, node, mask).build(inputs),)
        else:
            results = made.graph.add_node(
                node.op, inputs, name=node.name, types=node.types, output_names=node.output_names
            )
        values.update((Ref(node.id, place), value) for place, value in enumerate(results))
    picks = [] if capture is None else router_picks(graph, capture)
    routed = [] if residency is None else [node.inputs[2] for node in expert_nodes(graph)]
    made.picks = tuple(f"{HOST_MARKER}/picks/{place}" for place in range(len(picks)))
    made.routed = tuple(f"{HOST_MARKER}/routed/{place}" for place in range(len(routed)))
    outputs = [values[value.ref] for value in graph.outputs]
    hidden = [values[ref] for ref in (*picks, *routed) if ref is not None]
    made.graph.set_outputs([*outputs, *hidden], [*graph.output_names, *made.picks, *made.routed])
    return made


class _Split:
    """Writes a product by experts as one on the device and one on the host."""

    def __init__(self, made: MoeGraph, source: Graph, node: Node, mask: Mask) -> None:
        self.made = made
        self.graph = made.graph
        self.node = node
        self.resident = np.flatnonzero(mask)
        self.absent = np.flatnonzero(~mask)
        self.count = len(mask)
        ref = node.inputs[1]
        self.weight = None if ref is None else source.nodes[ref.node]

    def build(self, inputs: Sequence[Value | None]) -> Value:
        """Return the product, under the name the node had."""
        x, weight, experts = inputs
        if x is None or weight is None or experts is None:
            raise GraphVerifyError(f"{self.node} lacks an input")
        name = self.node.name
        if not self.resident.size:
            whole = (x, weight, experts)
            return self.graph.add_node(self.node.op, whole, name=f"{name}{HOST_MARKER}", types=self.node.types)[0]
        ids = self.graph.cast(experts, DType.I32)
        # Rows of the other side get -1: the loop over experts skips them, a copy for each row takes any matrix.
        here = self.graph.gather(self.graph.constant(self._places(self.resident)), ids, axis=0)
        there = self.graph.gather(self.graph.constant(self._places(self.absent)), ids, axis=0)
        flags = np.isin(np.arange(self.count), self.resident).astype(np.int32)[:, None]
        is_here = self.graph.cast(self.graph.gather(self.graph.constant(flags), ids, axis=0), DType.BOOL)
        op = self.node.op
        on_device = self.graph.append(op, x, self._part(self.resident, "resident"), here, name=f"{name}/resident")
        on_host = self.graph.append(op, x, self._part(self.absent, "host"), there, name=f"{name}{HOST_MARKER}")
        return self.graph.where_(is_here, on_device, on_host, name=name)

    def _places(self, experts: npt.NDArray[np.intp]) -> npt.NDArray[np.int32]:
        places = np.full(self.count, -1, np.int32)
        places[experts] = np.arange(len(experts), dtype=np.int32)
        return places

    def _part(self, experts: npt.NDArray[np.intp], label: str) -> Value:
        """Return the weight of some experts: a parameter of a view of the store, or a constant."""
        weight = self.weight
        chosen = tuple(int(expert) for expert in experts)
        if weight is not None and isinstance(weight.op, Param):
            name = f"{weight.op.name}/{self.node.name}/{label}"
            sizes = (weight.op.type.shape or Shape()).static()
            value = self.graph.param(name, (len(chosen), *sizes[1:]), weight.op.type.dtype)
            self.made.experts[name] = Experts(weight.op.name, chosen, self.count)
            return value
        if weight is not None and isinstance(weight.op, Constant):
            return self.graph.constant(taken(weight.op.data, chosen), name=f"{self.node.name}/{label}")
        raise GraphVerifyError(
            f"{self.node} computes the weights of its experts in the graph; only a parameter that is not mutable, or "
            "a constant, can be kept on the host"
        )


def taken(data: TensorData, experts: Sequence[int]) -> TensorData:
    """Return the data of some experts, the first axis; a run of neighbours shares the memory.

    Raises:
        GraphVerifyError: experts do not begin at whole bytes.
    """
    count = data.shape[0]
    size, rest = divmod(data.buffer.nbytes, max(count, 1))
    if rest:
        raise GraphVerifyError(f"an expert of {data.dtype.value}{list(data.shape)} is no whole number of bytes")
    shape = (len(experts), *data.shape[1:])
    first, last = experts[0], experts[-1] + 1
    if list(experts) == list(range(first, last)):
        return TensorData(data.dtype, shape, data.buffer[first * size : last * size])
    rows = data.buffer.reshape(count, size)[list(experts)]
    return TensorData(data.dtype, shape, rows.reshape(-1))


def masks_of_products(
    graph: Graph, merged: Mask | None, per_layer: Sequence[Mask] | None, products_per_layer: int = 3
) -> list[Mask]:
    """Return the mask of each product by experts; an expert that no mask speaks of is resident.

    A layer has three products: gate, up and down.
    """
    found = []
    for ordinal, node in enumerate(expert_nodes(graph)):
        layer = ordinal // products_per_layer
        given = merged
        if per_layer is not None:
            given = per_layer[layer] if layer < len(per_layer) else None
        mask = np.ones(_expert_count(graph, node), bool)
        if given is not None:
            mask[: len(given)] = given[: len(mask)]
        found.append(mask)
    return found


def account(routed: Mapping[str, npt.NDArray[np.generic]], masks: Sequence[Mask]) -> dict[str, int]:
    """Return how many experts were called and how many rows they got, on the device and on the host."""
    totals: dict[str, int] = dict.fromkeys(("gpu_expert_calls", "cpu_expert_calls", "gpu_tokens", "cpu_tokens"), 0)
    for ids, mask in zip(routed.values(), masks, strict=True):
        experts, rows = np.unique(np.asarray(ids).astype(np.int64), return_counts=True)
        for expert, count in zip(experts, rows, strict=True):
            side = "gpu" if not 0 <= expert < len(mask) or mask[expert] else "cpu"
            totals[f"{side}_expert_calls"] += 1
            totals[f"{side}_tokens"] += int(count)
    return totals


def _expert_count(graph: Graph, node: Node) -> int:
    ref = node.inputs[1]
    if ref is None:
        raise GraphVerifyError(f"{node} lacks its weight")
    return int(graph.value(ref).shape.static()[0])
