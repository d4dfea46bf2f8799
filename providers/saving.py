"""Writes models that ONNX Runtime has optimised for a device, as ONNX or in ONNX Runtime's own format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlx_ort.converters.to_onnx import PROTOBUF_LIMIT, all_weights
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.device import Device
from rlx_ort.errors import ConversionError, DeviceUnavailableError
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions, OptimizationLevel, WeightSharing
from rlx_ort.providers.base import SessionRequest
from rlx_ort.providers.engine import opening
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.registry import default_registry

__all__ = ["save_optimized"]

_INLINE_BYTES = "1024"  # smaller tensors stay in the model, where ONNX Runtime's shape logic sees them


def save_optimized(
    graph: Graph, path: Path, device: Device | str = "cpu", *, ort_format: bool, external_data: bool, portable: bool
) -> None:
    """Open a session of a graph and make ONNX Runtime write the optimised model; the file must not exist.

    Args:
        graph: the graph; every parameter needs data.
        path: the file to write. With `external_data`, weights go to `<file name>.data` beside it.
        device: the device whose execution provider optimises; nodes that it takes are written in its form.
        ort_format: whether to write ONNX Runtime's format instead of ONNX.
        external_data: whether weights go to a file of their own; ONNX Runtime's format has them inside.
        portable: whether to leave out what depends on this machine's processor, such as blocked layouts.

    Raises:
        ConversionError: no execution provider of ONNX Runtime serves the device, or the model is too large.
        DeviceUnavailableError: the device does not work here.
        EngineError: ONNX Runtime refused the model or could not write it.
    """
    device = Device(device) if isinstance(device, str) else device
    provider = default_registry().for_device(device)
    if not isinstance(provider, OrtProvider):
        raise ConversionError(f"{device.display} is no device of ONNX Runtime, which is what optimises models")
    problem = provider.missing(device)
    if problem is not None:
        raise DeviceUnavailableError(device, problem.reason, problem.remedy)
    level = OptimizationLevel.EXTENDED if portable else OptimizationLevel.ALL
    # RAW: the weights are passed in memory, so the file has them and no references to the source's files.
    options = CompileOptions(optimization=level, sharing=WeightSharing.RAW)
    exported = export_model(graph, options)
    weights = all_weights(graph, exported)
    total = sum(data.nbytes for data in weights.values())
    if total > PROTOBUF_LIMIT and not external_data:
        raise ConversionError(
            f"{path.name} would hold {total} bytes of weights, above the 2 GB of one file; "
            + ("ONNX Runtime's format has no data files: write .onnx" if ort_format else "pass external_data=True")
        )

    def prepare(made: Any) -> None:
        made.optimized_model_filepath = str(path)
        made.add_session_config_entry("session.save_model_format", "ORT" if ort_format else "ONNX")
        if external_data and not ort_format:
            key = "session.optimized_model_external_initializers"
            made.add_session_config_entry(f"{key}_file_name", f"{path.name}.data")
            made.add_session_config_entry(f"{key}_min_size_in_bytes", _INLINE_BYTES)

    request = SessionRequest(device, exported, weights, options)
    # Not through the compile cache: the session has to optimise, and to write the model.
    session, memory = opening._open(provider.recipe(device, options), request, prepare=prepare)
    del session, memory
