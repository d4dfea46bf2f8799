"""The proof that a device works: a session of one node that is opened on it, assigned to it, run, and right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rlx_ort.converters.to_onnx.exported import ExportedModel
from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError, RlxError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.types import TensorType
from rlx_ort.options.compile_options import CacheUse, CompileOptions, OptimizationLevel, Precision
from rlx_ort.providers.base import Availability, EngineSession, SessionRequest

__all__ = ["probe_model", "prove"]

# Opset 21 has the densest kernels on every provider; static shapes, because some providers take no others.
_PROBE = """
<ir_version: 10, opset_import: ["" : 21]>
probe (float[2, 2] x, float[2, 2] w) => (float[2, 2] y) { y = MatMul (x, w) }
"""


@functools.cache
def probe_model() -> ExportedModel:
    """Return a model of one matrix product of 2 by 2, which every provider that computes has a kernel for."""
    import onnx.parser

    proto = onnx.parser.parse_model(_PROBE)
    proto.graph.node[0].name = "probe"
    square = TensorType(DType.F32, Shape((2, 2)))
    return ExportedModel(
        model=proto,
        params=(),
        nodes=(),
        origin_names={},
        input_types={"x": square, "w": square},
        output_types={"y": square},
    )


def prove(
    device: Device,
    ep_name: str,
    open_on: Callable[[SessionRequest], EngineSession],
    facts: Availability,
    precision: Precision = Precision.F32,
) -> Availability:
    """Return `facts` when the probe runs on the device and is right, else an answer that says what went wrong.

    Opens a session, runs it once and closes it: milliseconds on the CPU, up to a second on a GPU.
    """
    options = CompileOptions(precision, optimization=OptimizationLevel.OFF, intra_op_threads=1, cache=CacheUse.OFF)
    left = np.array([[1, 2], [3, 4]], np.float32)
    right = np.array([[5, 6], [7, 8]], np.float32)
    try:
        session = open_on(SessionRequest(device, probe_model(), {}, options))
        try:
            assigned = {node.provider for node in session.assignments}
            (result,) = session.run(["y"], {"x": left, "w": right})
        finally:
            session.close()
    except DeviceUnavailableError as err:
        return Availability(False, err.reason, err.remedy or facts.remedy)
    except RlxError as err:
        return Availability(False, str(err), facts.remedy)
    if assigned != {ep_name}:
        found = ", ".join(sorted(assigned)) or "no provider that ONNX Runtime names"
        return Availability(False, f"{ep_name} left a matrix product to {found}", facts.remedy)
    wanted = np.array([[19, 22], [43, 50]], np.float32)
    if not np.allclose(result, wanted, rtol=1e-2):
        return Availability(False, f"{ep_name} computes a matrix product wrongly: {result.tolist()}", facts.remedy)
    return replace(facts, available=True, reason="", remedy="")
