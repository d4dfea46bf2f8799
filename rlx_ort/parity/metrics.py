"""The difference of two outputs, computed in float64 block by block to save memory, and the tolerances for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from rlx_ort.converters.bundle import ModelBundle
from rlx_ort.converters.protos import graphs_of, nodes_of
from rlx_ort.ir.types import TensorType
from rlx_ort.numerics import is_exact

Array: TypeAlias = npt.NDArray[Any]

_BLOCK = 1 << 18  # elements; 2 MiB a float64 temporary

_F32 = 1e-5  # some tens of roundings of 6e-8: a deep model adds up the differences of kernels and summation orders
_DEVICES = 1e-3  # kernels of another device sum in another order and approximate `exp` and `tanh`
_F16 = 5e-3  # one rounding is 5e-4
_BF16 = 4e-2  # three bits less than f16, so eight times as much
_HALVES: dict[int, str] = {onnx.TensorProto.FLOAT16: "f16", onnx.TensorProto.BFLOAT16: "bf16"}
# Bits of quantised values -> least cosine: single elements differ much, the direction of the result does not.
_COSINE = {8: 0.99, 4: 0.98}


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between a value and a reference.

    Attributes:
        max_abs: largest |reference - value| over the positions where both are finite.
        relative_l2: L2 norm of the difference over the larger of the two norms: 0 for equal values, at most 2.
        cosine: cosine of the angle between the two, as vectors; 1 if both are zero.
        nonfinite: number of positions where one is NaN or infinite and the other is not the same.
        differing: number of unequal elements of integers, bools and text; None for floats.
        elements: the number of elements of the reference.
        shapes: both shapes if they differ; nothing else was computed then.
    """

    max_abs: float
    relative_l2: float
    cosine: float
    nonfinite: int
    differing: int | None
    elements: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __str__(self) -> str:
        if self.shapes is not None:
            return f"shape {list(self.shapes[0])} against {list(self.shapes[1])}"
        text = f"max abs {self.max_abs:.3g}, relative L2 {self.relative_l2:.3g}, cosine {self.cosine:.6g}"
        text += f", {self.nonfinite} not finite on one side only" if self.nonfinite else ""
        return text + (f", {self.differing} of {self.elements} differ" if self.differing else "")

    @property
    def size(self) -> float:
        """One number to rank by: 0 for equal values, infinity if shapes or non-finite values differ."""
        if self.shapes is not None or self.nonfinite:
            return math.inf
        if self.differing is not None:
            return self.differing / max(self.elements, 1)
        return self.relative_l2


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest accepted difference. Shapes and non-finite values must agree under every tolerance.

    Attributes:
        relative_l2: upper bound of `Difference.relative_l2` of floats; None for no bound.
        cosine: lower bound of `Difference.cosine` of floats, and of the share of equal elements of integers, which
            quantised arithmetic may change; with None cosines have no bound, and integers must be equal.
    """

    relative_l2: float | None = 1e-5
    cosine: float | None = None

    def accepts(self, difference: Difference) -> bool:
        """Return whether a difference is within the tolerance."""
        if difference.shapes is not None or difference.nonfinite:
            return False
        if difference.differing is not None:
            least = 1.0 if self.cosine is None else self.cosine
            return difference.differing <= (1.0 - least) * difference.elements
        within = self.relative_l2 is None or difference.relative_l2 <= self.relative_l2
        return within and (self.cosine is None or difference.cosine >= self.cosine)

    def __str__(self) -> str:
        parts = [] if self.relative_l2 is None else [f"relative L2 <= {self.relative_l2:g}"]
        parts += [] if self.cosine is None else [f"cosine >= {self.cosine:g}"]
        return ", ".join(parts) or "any difference"


def tolerance_for(dtypes: Collection[str], *, other_device: bool = False, bits: int | None = None) -> Tolerance:
    """Return the default tolerance for two models.

    For quantised models a cosine of 0.99 at 8 bits and 0.98 at 4. For others a relative L2 error of 1e-5 in f32, 5e-3
    if one side has f16 and 4e-2 if one has bf16, and at least 1e-3 between two devices. `dtypes` are the float types on
    both sides, such as `f32`. `bits` is None unless one side is the other quantised.
    """
    if bits is not None:
        return Tolerance(relative_l2=None, cosine=_COSINE[bits])
    allowed = _BF16 if "bf16" in dtypes else _F16 if "f16" in dtypes else _F32
    return Tolerance(max(allowed, _DEVICES) if other_device else allowed)


def dtypes_of(*models: object) -> set[str]:
    """Return the names of the element types in the weights, inputs and outputs of models; none of ORT files.

    Those of f16 and bf16 are found inside as well: such values come from a constant or a node that names the type.
    """
    dtypes = set()
    for model in models:
        if isinstance(model, ModelBundle):
            dtypes |= {_HALVES[number] for number in _named_types(model.proto) if number in _HALVES}
            dtypes |= {data.dtype.value for data in model.weights.values()}
            kinds = (*model.input_types().values(), *model.output_types().values())
            dtypes |= {kind.dtype.value for kind in kinds if isinstance(kind, TensorType)}
    return dtypes


def _named_types(proto: onnx.ModelProto) -> Iterator[int]:
    """Yield ONNX's numbers of the element types that constants have and nodes name."""
    for graph in graphs_of(proto):
        yield from (tensor.data_type for tensor in graph.initializer)
    in_functions = (node for function in proto.functions for node in function.node)
    for node in itertools.chain(nodes_of(proto), in_functions):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t.data_type
            elif attribute.name in ("to", "dtype"):
                yield attribute.i


def difference(reference: Array, value: Array) -> Difference:
    """Return the difference of an array to a reference; dtypes may differ.

    Reads both once, float64 twice as its squares may overflow, and copies a block at a time.
    """
    if reference.shape != value.shape:
        return Difference(math.inf, math.inf, 0.0, 0, None, reference.size, (reference.shape, value.shape))
    if reference.dtype.kind in "OUS" or value.dtype.kind in "OUS":
        differing = int(np.count_nonzero(reference.astype(np.str_) != value.astype(np.str_)))
        return Difference(float(differing > 0), float(differing > 0), float(not differing), 0, differing, value.size)
    left, right = _flat(reference), _flat(value)
    exact = is_exact(left.dtype) and is_exact(right.dtype)
    scale = _largest(left, right) if np.float64 in (left.dtype, right.dtype) else 1.0
    differing = nonfinite = 0
    max_abs = delta = dot = norm_left = norm_right = 0.0
    for a, b in _blocks(left, right):
        if exact:
            differing += int(np.count_nonzero(a != b))
        x, y = a.astype(np.float64), b.astype(np.float64)
        finite = np.isfinite(x) & np.isfinite(y)
        if not finite.all():
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            nonfinite += int(np.count_nonzero(~finite & ~same))
            x, y = x[finite], y[finite]
        gap = x - y
        max_abs = max(max_abs, float(np.abs(gap).max(initial=0.0)))
        x, y, gap = x / scale, y / scale, gap / scale
        delta += float(gap @ gap)
        dot += float(x @ y)
        norm_left += float(x @ x)
        norm_right += float(y @ y)
    largest = math.sqrt(max(norm_left, norm_right))
    relative = math.sqrt(delta) / largest if largest else 0.0
    norms = math.sqrt(norm_left) * math.sqrt(norm_right)
    cosine = 1.0 if not delta else min(1.0, dot / norms) if norms else 0.0
    return Difference(max_abs, relative, cosine, nonfinite, differing if exact else None, reference.size)


def _flat(array: Array) -> Array:
    """Return the elements in one row, the parts of complex numbers as two."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.real(flat).dtype) if flat.dtype.kind == "c" else flat


def _largest(left: Array, right: Array) -> float:
    """Return the largest finite magnitude in both arrays, 1 if there is none or it is 0."""
    largest = 0.0
    for a, b in _blocks(left, right):
        for block in (np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64))):
            largest = max(largest, float(block[np.isfinite(block)].max(initial=0.0)))
    return largest or 1.0


def _blocks(left: Array, right: Array) -> Iterator[tuple[Array, Array]]:
    for start in range(0, left.size, _BLOCK):
        yield left[start : start + _BLOCK], right[start : start + _BLOCK]
