"""`bisect`: the first node at which two models, or two devices, part.

Every value inside both models becomes an output, as many at a time as memory allows, and each pair of counterparts is
compared. A node is to blame when what it reads agrees and what it writes does not. Between precisions or devices
everything differs a little, so there the node is named at which the error grows most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx_ort.device import Device
from rlx_ort.errors import ConversionError
from rlx_ort.options.compile_options import CompileOptions, OptimizationLevel
from rlx_ort.parity.align import Pairing, nearest, pair_values
from rlx_ort.parity.causes import Producer, causes, producers
from rlx_ort.parity.compare import renamed_inputs
from rlx_ort.parity.metrics import Difference, Tolerance, difference
from rlx_ort.parity.opening import OrtFormatFile, as_model, open_model

if TYPE_CHECKING:
    from pathlib import Path

    import onnx

    from rlx_ort.converters.bundle import ModelBundle
    from rlx_ort.ir.graph import Graph

__all__ = ["BATCH_BYTES", "Divergence", "bisect"]

BATCH_BYTES = 256 << 20
"""Values that are held at a time, by their estimated size: those of one side, while the other side runs."""

_UNKNOWN_BYTES = 1 << 20
_LARGEST = 2.0  # of a relative difference
_NEARLY_EXACT = 1e-6  # rounding of f32 in kernels of one engine that see another order


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two models part.

    Attributes:
        node: the name of the node, of its first output if it has none.
        op_type: its operator.
        output: the value that differs.
        other_node: its counterpart in the second model, by the same rule.
        other_output: the counterpart of the value.
        found: how far the two values are apart.
        before: the largest relative difference among what it is computed from.
        causes: what differs in the nodes themselves: operator, attributes, weights; empty where the arithmetic does.
        between: nodes of the first model before it whose values have no counterpart, so one of them may be to blame.
        compared: how many values were compared.
        optimized: whether it only shows when the engine optimises the models.
    """

    node: str
    op_type: str
    output: str
    other_node: str
    other_output: str
    found: Difference
    before: float
    causes: tuple[str, ...]
    between: tuple[str, ...]
    compared: int
    optimized: bool = False


def bisect(
    a: ModelBundle | OrtFormatFile | Graph | onnx.ModelProto | str | Path,
    b: ModelBundle | OrtFormatFile | Graph | onnx.ModelProto | str | Path,
    inputs: Mapping[str, Any],
    *,
    devices: tuple[Device | str, Device | str] = ("cpu", "cpu"),
    tolerance: Tolerance | None = None,
    options: CompileOptions | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> Divergence | None:
    """Return the first node at which two models part on the given inputs, or None where none does.

    Opens one session of each model for every batch of values; without optimisation first, so that each node of the
    file is there, and as `options` say where that shows nothing. Nodes in bodies are not looked into: their owner is
    named.

    Args:
        a: the reference.
        b: what is compared with it; may be the same model, on another device.
        inputs: name -> array, as `Comparison.inputs` has them.
        devices: where each runs.
        tolerance: what counts as equal.
        options: how the sessions are opened.
        batch_bytes: the most bytes of values to hold of one side.

    Raises:
        ConversionError: a model is in ONNX Runtime's own format, which does not show its nodes.
        EngineError: a session or a run failed.
    """
    first = as_model(a)
    second = first if b is a else as_model(b)
    if isinstance(first, OrtFormatFile) or isinstance(second, OrtFormatFile):
        raise ConversionError("a model in ORT format shows no values inside; compare the ONNX model it was made from")
    places = (Device(devices[0]), Device(devices[1]))
    search = _Search(first, second, inputs, places, tolerance or Tolerance(), batch_bytes)
    chosen = options or CompileOptions()
    found = search.run(chosen.with_(optimization=OptimizationLevel.OFF))
    if found is None and chosen.optimization is not OptimizationLevel.OFF:
        found = search.run(chosen, optimized=True)
    return found


class _Search:
    """One search; keeps what both levels of optimisation need."""

    def __init__(
        self,
        a: ModelBundle,
        b: ModelBundle,
        inputs: Mapping[str, Any],
        devices: tuple[Device, Device],
        tolerance: Tolerance,
        batch_bytes: int,
    ) -> None:
        self._a, self._b, self._inputs, self._devices = a, b, inputs, devices
        self._batch_bytes = batch_bytes
        self._pairs: Pairing = pair_values(a.proto.graph, b.proto.graph)
        self._above = nearest(a.proto.graph, self._pairs)
        self._producers = (producers(a.proto.graph), producers(b.proto.graph))
        loosest = 0.0 if tolerance.cosine is None else math.sqrt(max(0.0, 2 * (1 - tolerance.cosine)))
        self._allowed = loosest if tolerance.relative_l2 is None else tolerance.relative_l2

    def run(self, options: CompileOptions, *, optimized: bool = False) -> Divergence | None:
        """Compare every pair and return the node to blame."""
        found: dict[str, Difference] = {}
        noisy = self._devices[0] != self._devices[1]
        for batch in self._batches():
            for name, gap, same_type in self._compared(batch, options):
                found[name] = gap
                noisy = noisy or not same_type
            if not noisy and (blamed := self._first(found)) is not None:
                return self._divergence(blamed, found, optimized)
        blamed = self._steepest(found) if noisy else None
        return None if blamed is None else self._divergence(blamed, found, optimized)

    def _first(self, found: Mapping[str, Difference]) -> str | None:
        """Return the first value that differs though all it is computed from agrees."""
        clean = min(self._allowed, _NEARLY_EXACT)
        for name, gap in found.items():
            if gap.size > self._allowed:
                return self._rooted(name, found, clean)
        return None

    def _rooted(self, name: str, found: Mapping[str, Difference], clean: float) -> str:
        """Follow a difference upwards to where it comes from: it may begin below the tolerance."""
        while True:
            sources = [source for source in self._above[name][0] if source in found and found[source].size > clean]
            if not sources:
                return name
            name = max(sources, key=lambda source: found[source].size)

    def _steepest(self, found: Mapping[str, Difference]) -> str | None:
        """Return the value at which the error grows most, among those beyond the tolerance."""
        floor = max(self._allowed / 10, _NEARLY_EXACT)
        best, growth = None, 0.0
        for name, gap in found.items():
            if gap.size > self._allowed:
                grown = min(gap.size, _LARGEST) / max(self._before(name, found), floor)
                if grown > growth:
                    best, growth = name, grown
        return best

    def _before(self, name: str, found: Mapping[str, Difference]) -> float:
        sizes = [min(found[source].size, _LARGEST) for source in self._above[name][0] if source in found]
        return max(sizes, default=0.0)

    def _divergence(self, name: str, found: Mapping[str, Difference], optimized: bool) -> Divergence:
        other = self._pairs[name]
        mine, theirs = self._producers[0][name], self._producers[1][other]
        return Divergence(
            node=mine.label,
            op_type=mine.node.op_type,
            output=name,
            other_node=theirs.label,
            other_output=other,
            found=found[name],
            before=self._before(name, found),
            causes=self._causes(mine, theirs),
            between=self._above[name][1],
            compared=len(found),
            optimized=optimized,
        )

    def _causes(self, mine: Producer, theirs: Producer) -> tuple[str, ...]:
        return () if self._a is self._b else causes(self._a, mine, self._b, theirs)

    def _batches(self) -> Iterator[list[str]]:
        """Yield paired values in order, so many that their estimated bytes stay below the limit."""
        sizes = _estimated_bytes(self._a, self._inputs)
        batch: list[str] = []
        total = 0
        for name in self._pairs:
            size = sizes.get(name, _UNKNOWN_BYTES)
            if batch and total + size > self._batch_bytes:
                yield batch
                batch, total = [], 0
            batch.append(name)
            total += size
        if batch:
            yield batch

    def _compared(self, batch: Sequence[str], options: CompileOptions) -> Iterator[tuple[str, Difference, bool]]:
        """Yield (value, difference, whether both have one dtype) for a batch; lists and maps are passed over."""
        others = [self._pairs[name] for name in batch]
        with open_model(self._a, self._devices[0], options, extra_outputs=batch) as opened:
            left = opened.run(self._inputs, batch)
        with open_model(self._b, self._devices[1], options, extra_outputs=others) as opened:
            right = opened.run(renamed_inputs(opened, self._inputs, self._b.origin), others)
        for name, x, y in zip(batch, left, right, strict=True):
            if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
                yield name, difference(x, y), x.dtype == y.dtype


def _estimated_bytes(model: ModelBundle, inputs: Mapping[str, Any]) -> dict[str, int]:
    """Return value -> bytes, for those whose shape ONNX infers from the shapes of the inputs."""
    import onnx

    from rlx_ort.converters.infer import infer_proto
    from rlx_ort.ir.types import TensorType

    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    for value in proto.graph.input:
        if value.name in inputs:
            dims = value.type.tensor_type.shape.dim
            for dim, size in zip(dims, np.shape(inputs[value.name]), strict=False):
                dim.dim_value = size
    del proto.graph.value_info[:]  # with the old symbols
    found = {}
    for name, kind in infer_proto(proto).items():
        count = kind.shape.num_elements if isinstance(kind, TensorType) and kind.shape is not None else None
        if isinstance(kind, TensorType) and count is not None:
            found[name] = kind.dtype.nbytes(count)
    return found
