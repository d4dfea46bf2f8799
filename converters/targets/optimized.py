"""ONNX as a device's execution provider has optimised it: opens faster, and runs on that provider only."""

from __future__ import annotations

from pathlib import Path

from rlx_ort.converters.bundle import ModelBundle, graph_from_bundle
from rlx_ort.converters.files import EXTERNAL_ABOVE_BYTES
from rlx_ort.converters.targets.options import EngineSaver, TargetOptions
from rlx_ort.errors import ConversionError

__all__ = ["saver_of", "write_optimized"]


def write_optimized(bundle: ModelBundle, path: Path, options: TargetOptions) -> None:
    """Write the optimised model; fused and layout-specific nodes in it belong to the device's execution provider.

    Opens a session on the device, so it takes the time and memory of one. The file should be opened with the
    optimisations off that it has behind it.

    Raises:
        ConversionError: nothing that writes it was handed in, or the model is above 2 GB without a data file.
        DeviceUnavailableError: the device does not work here.
        EngineError: ONNX Runtime refused the model, or could not write it.
    """
    saver = saver_of(options, path)
    external = options.external_data
    if external is None:
        external = sum(data.nbytes for data in bundle.weights.values()) > EXTERNAL_ABOVE_BYTES
    device = options.device or "cpu"
    saver(graph_from_bundle(bundle), path, device, ort_format=False, external_data=external, portable=False)


def saver_of(options: TargetOptions, path: Path) -> EngineSaver:
    """Return what writes optimised models.

    Raises:
        ConversionError: there is nothing.
    """
    if options.saver is None:
        raise ConversionError(
            f"{path.name} is written by ONNX Runtime; pass TargetOptions(saver=rlx_ort.providers.saving.save_optimized)"
        )
    return options.saver
