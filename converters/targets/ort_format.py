"""ONNX Runtime's own format, `.ort`: optimised, with its weights inside, for builds of the engine that read no ONNX."""

from __future__ import annotations

from pathlib import Path

from rlx_ort.converters.bundle import ModelBundle, graph_from_bundle
from rlx_ort.converters.targets.optimized import saver_of
from rlx_ort.converters.targets.options import TargetOptions

__all__ = ["write_ort_format"]


def write_ort_format(bundle: ModelBundle, path: Path, options: TargetOptions) -> None:
    """Write an `.ort` file. Without a device it runs on any CPU: what depends on this processor is left out.

    Opens a session, so it takes the time and memory of one.

    Raises:
        ConversionError: nothing that writes it was handed in, or the model is above 2 GB.
        DeviceUnavailableError: the device does not work here.
        EngineError: ONNX Runtime refused the model, or could not write it.
    """
    saver = saver_of(options, path)
    graph = graph_from_bundle(bundle)
    portable = options.device is None
    saver(graph, path, options.device or "cpu", ort_format=True, external_data=False, portable=portable)
