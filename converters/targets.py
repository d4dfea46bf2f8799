"""Targets: a `ModelBundle` as files of a format, whole or not at all; the suffix of the file chooses the format."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rlx_ort.converters.bundle import ModelBundle, external_tensors, graph_from_bundle, location_of
from rlx_ort.converters.files import EXTERNAL_ABOVE_BYTES, Progress, refuse_existing, save_bundle, staging
from rlx_ort.converters.onnx_types import refer
from rlx_ort.converters.protos import copied
from rlx_ort.converters.transforms.opset import to_opset
from rlx_ort.device import Device
from rlx_ort.errors import ConversionError, WriteError
from rlx_ort.ir.serde import save_json
from rlx_ort.ir.tensor import read_tensors, write_tensors

SUFFIXES = (".onnx", ".json", ".ort")
"""Suffixes of targets: ONNX, the graph format of `rlx_ort`, ONNX Runtime's own format."""


EngineSaver: TypeAlias = Callable[..., None]
"""Writes an engine's optimised form of a graph; `rlx_ort.providers.ort_provider.save_optimized` is the one."""


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """How to write a model.

    Attributes:
        opset: the ai.onnx opset of an ONNX file; None leaves the bundle's.
        ir_version: the IR version of an ONNX file; None leaves the bundle's, or follows the opset.
        external_data: whether weights of an ONNX file go to `<file name>.data`; None decides by their size.
        params: name of a safetensors file beside an ONNX file that gets the weights, and that it refers to; ONNX
            Runtime maps it, and other tools read it. Excludes `external_data`.
        device: the device that `.onnx` is optimised for, and `.ort` made for; None optimises `.onnx` not at all, and
            `.ort` for any CPU.
        overwrite: whether files that are there may be replaced.
        saver: the writer of optimised models; converters know no engine, so it is handed in.
        progress: called with the number of further bytes of weights written to an ONNX file.
    """

    opset: int | None = None
    ir_version: int | None = None
    external_data: bool | None = None
    params: str | None = None
    device: Device | str | None = None
    overwrite: bool = False
    saver: EngineSaver | None = None
    progress: Progress | None = None


def write_target(bundle: ModelBundle, path: str | os.PathLike[str], options: TargetOptions | None = None) -> list[Path]:
    """Write a model and return the files, the model first.

    All files are made in a hidden folder beside the target and moved into place together. If that fails or is
    interrupted, no new file is left and the old ones are restored.

    Args:
        bundle: the model.
        path: the file to write; its suffix chooses the format, see `SUFFIXES`.
        options: opset, weights and device; see `TargetOptions`.

    Raises:
        ConversionError: the suffix is unknown, a file exists, options contradict each other or the format cannot
            express the model; or a file cannot be written, as when the disk is full.
        DeviceUnavailableError: the device of an optimised model does not work here.
        EngineError: ONNX Runtime refused the model, or could not write it.
    """
    options = options or TargetOptions()
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConversionError(f"{target} has to end in {', '.join(SUFFIXES)}, which choose the format")
    _check(target, suffix, options)
    refuse_existing([target], overwrite=options.overwrite)
    with staging(target) as stage:
        try:
            if suffix == ".ort" or options.device is not None:
                _write_optimized(bundle, stage.path, options, ort_format=suffix == ".ort")
            elif suffix == ".json":
                save_json(graph_from_bundle(bundle), stage.path)
            else:
                _write_onnx(bundle, stage.path, options)
        except OSError as err:
            raise WriteError(f"{target} cannot be written: {err}") from err
        files = sorted(file for file in stage.path.parent.iterdir() if file.is_file())
        return stage.publish(files, overwrite=options.overwrite)


def _check(target: Path, suffix: str, options: TargetOptions) -> None:
    choices = ("opset", "ir_version", "external_data", "params", "device")
    allowed = {".onnx": set(choices), ".json": set(), ".ort": {"device"}}[suffix]
    if suffix == ".onnx" and options.device is not None:
        allowed = {"device", "external_data"}
    extra = [name for name in choices if getattr(options, name) is not None and name not in allowed]
    if suffix == ".ort" and options.external_data is False:
        extra.remove("external_data")  # its weights are always inside
    if extra:
        what = f"{suffix} for a device" if suffix == ".onnx" else suffix
        raise ConversionError(f"{target}: {', '.join(extra)} cannot be chosen for {what}; leave it out")
    if options.params is None:
        return
    if options.external_data is not None or Path(options.params).name != options.params:
        raise ConversionError(f"{target}: params is the name of a file beside it, and excludes external_data")


def _write_optimized(bundle: ModelBundle, path: Path, options: TargetOptions, *, ort_format: bool) -> None:
    """Let the engine write the model; opens a session on the device, so it takes the time and memory of one.

    Fused and layout-specific nodes in the result belong to the device's execution provider. An `.ort` file without a
    device runs on any CPU: optimisations that depend on this processor are left out.
    """
    if options.saver is None:
        raise ConversionError(
            f"{path.name} is written by ONNX Runtime; pass "
            "TargetOptions(saver=rlx_ort.providers.ort_provider.save_optimized)"
        )
    external = not ort_format and options.external_data
    if external is None:
        external = sum(data.nbytes for data in bundle.weights.values()) > EXTERNAL_ABOVE_BYTES
    options.saver(
        graph_from_bundle(bundle),
        path,
        options.device or "cpu",
        ort_format=ort_format,
        external_data=external,
        portable=ort_format and options.device is None,
    )


def _write_onnx(bundle: ModelBundle, path: Path, options: TargetOptions) -> None:
    """Write the model, or the weights to a safetensors file and the model with references to places in it."""
    if options.opset is not None or options.ir_version is not None:
        bundle, _ = to_opset(bundle, options.opset or bundle.opset, options.ir_version)
    if options.params is None:
        save_bundle(bundle, path, external_data=options.external_data, progress=options.progress)
        return
    beside = path.with_name(options.params)
    write_tensors(beside, bundle.weights, {"format": "onnx"})
    stored, _ = read_tensors(beside)
    model = copied(bundle.proto)
    for tensor in external_tensors(model):
        data = stored[location_of(tensor)]
        refer(tensor, options.params, 0 if data.source is None else data.source.offset, data.nbytes)
    path.write_bytes(model.SerializeToString(deterministic=True))
