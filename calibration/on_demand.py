"""Measures kernels on demand: the nodes of a graph whose price is assumed and may weigh in its time."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

from rlx_ort.calibration import store
from rlx_ort.calibration.features import DEFAULT_DIM, Kernel, Workload
from rlx_ort.calibration.measure import Node, measure_nodes
from rlx_ort.calibration.model import MeasuredCostModel, axes_of
from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType, ValueType

_MAY_TAKE = 30.0
"""Times its roofline that an unknown operator may take: on two cores Softplus took 32 times as long as Sigmoid."""

_WEIGHS = 0.05  # of the predicted time: a smaller share is not worth a measurement
_log = logging.getLogger(__name__)
_refused: set[tuple[object, str]] = set()  # device and kernel that could not be measured: not tried again


def unknown(workload: Workload, model: MeasuredCostModel) -> dict[Kernel, ExportedNode]:
    """Return the kernels whose price is assumed and may weigh, the heaviest first, each with a node that needs it."""
    total_ns = sum(model.price(kernel).ns * count for kernel, count in workload.counts.items())
    at_worst: dict[Kernel, float] = {}
    for kernel, count in workload.counts.items():
        price = model.price(kernel)
        is_known = model.has(kernel.name) or (model.device, kernel.name) in _refused
        if not is_known and price.how in ("assumed", "extrapolated"):
            at_worst[kernel] = price.ns * count * (_MAY_TAKE if price.how == "assumed" else 1.0)
    limit_ns = _WEIGHS * max(total_ns, 1.0)
    wanted = [kernel for kernel in sorted(at_worst, key=lambda one: -at_worst[one]) if at_worst[kernel] >= limit_ns]
    nodes = {kernel: node for node, kernel in zip(workload.nodes, workload.kernels, strict=True) if kernel is not None}
    return {kernel: nodes[kernel] for kernel in wanted}


def measure_unknown(
    model: MeasuredCostModel,
    workloads: Sequence[tuple[Workload, Mapping[str, int]]],
    constants: Mapping[str, object],
    limit_s: float,
) -> int:
    """Measure the unknown operators of one model's workloads, keep their rows in the profile, and return the number.

    Takes `limit_s` seconds at most; the rest stays assumed. A node that cannot be measured alone is not tried
    again in this process. Each workload comes with sizes of its named dims; two sizes let prices follow a third.
    `constants` has the data of the model's constants, as far as it is known.
    """
    wanted: dict[str, tuple[Kernel, Node]] = {}
    for workload, dims in workloads:
        for kernel, record in unknown(workload, model).items():
            name = f"{kernel.name} {len(wanted)}"
            wanted[name] = kernel, _node(name, record, constants, dims)
    if not wanted:
        return 0
    rows, reasons = measure_nodes(model.device, [node for _, node in wanted.values()], limit_s)
    for name, reason in reasons.items():
        _log.info("%s is not measured on %s: %s", name, model.device.display, reason)
        if not reason.startswith("no time"):
            _refused.add((model.device, wanted[name][0].name))
    measured = []
    for row in rows:
        kernel = wanted[row.kernel[1:]][0]
        size = tuple(round(side) for side in axes_of(kernel))
        measured.append(dataclasses.replace(row, kernel=f"?{kernel.name}", size=size, dtype=kernel.dtype))
    if measured:
        store.add(model.device, measured)
    return len(measured)


def _node(name: str, record: ExportedNode, constants: Mapping[str, object], dims: Mapping[str, int]) -> Node:
    pattern = record.pattern
    attributes = {key: attribute.value for key, attribute in pattern.attributes.items()}
    inputs: list[TensorType | TensorData | None] = []
    for given, kind in zip(record.input_names, pattern.inputs, strict=True):
        data = constants.get(given)
        inputs.append(data if isinstance(data, TensorData) else _sized(kind, dims))
    outputs = tuple(sized for kind in pattern.outputs if (sized := _sized(kind, dims)) is not None)
    return Node(name, pattern.op_type, tuple(inputs), outputs, attributes, pattern.domain, pattern.version)


def _sized(kind: ValueType | None, dims: Mapping[str, int]) -> TensorType | None:
    if not isinstance(kind, TensorType) or kind.shape is None:
        return None
    sizes = [dim if isinstance(dim, int) else dims.get(dim or "", DEFAULT_DIM) for dim in kind.shape]
    return TensorType(kind.dtype, Shape(sizes))
