"""`write_target`: a bundle as files of the format its name asks for."""

from __future__ import annotations

import os
from pathlib import Path

from rlx_ort.converters.bundle import ModelBundle
from rlx_ort.converters.staging import refuse_existing, staging
from rlx_ort.converters.targets.options import TargetOptions
from rlx_ort.errors import ConversionError

__all__ = ["SUFFIXES", "write_target"]

SUFFIXES = (".onnx", ".json", ".ort")
"""What a target may end in: ONNX, the graph format of `rlx_ort`, ONNX Runtime's own format."""


def write_target(bundle: ModelBundle, path: str | os.PathLike[str], options: TargetOptions | None = None) -> list[Path]:
    """Write a model and return the files, the model first.

    All files are made in a hidden folder beside the target and moved into place together. When that fails or is
    interrupted, nothing of it is left and what was there before is there again.

    Args:
        bundle: the model.
        path: the file to write; its suffix says the format, see `SUFFIXES`.
        options: how.

    Raises:
        ConversionError: the suffix is unknown, a file exists, options contradict each other or the format cannot say
            the model; or a file cannot be written, as when the disk is full.
        DeviceUnavailableError: the device of an optimised model does not work here.
        EngineError: ONNX Runtime refused the model, or could not write it.
    """
    options = options or TargetOptions()
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConversionError(f"{target} has to end in {', '.join(SUFFIXES)}, which say what to write")
    _check(target, suffix, options)
    refuse_existing([target], overwrite=options.overwrite)
    with staging(target) as stage:
        try:
            _write(bundle, stage.path, suffix, options)
        except OSError as err:
            raise ConversionError(f"{target} cannot be written: {err}") from err
        files = sorted(file for file in stage.path.parent.iterdir() if file.is_file())
        return stage.publish(files, overwrite=options.overwrite)


def _check(target: Path, suffix: str, options: TargetOptions) -> None:
    given = {
        "opset": options.opset,
        "ir_version": options.ir_version,
        "external_data": options.external_data,
        "params": options.params,
        "device": options.device,
    }
    allowed = {".onnx": set(given), ".json": set(), ".ort": {"device"}}[suffix]
    if suffix == ".onnx" and options.device is not None:
        allowed = {"device", "external_data"}
    extra = [name for name, value in given.items() if value is not None and name not in allowed]
    if suffix == ".ort" and options.external_data is False:
        extra.remove("external_data")  # its weights are always inside
    if extra:
        what = f"{suffix} for a device" if suffix == ".onnx" else suffix
        raise ConversionError(f"{target}: {', '.join(extra)} cannot be chosen for {what}; leave it out")
    if options.params is None:
        return
    if options.external_data is not None or Path(options.params).name != options.params:
        raise ConversionError(f"{target}: params is the name of a file beside it, and excludes external_data")


def _write(bundle: ModelBundle, path: Path, suffix: str, options: TargetOptions) -> None:
    match suffix:
        case ".json":
            from rlx_ort.converters.targets.ir_json import write_ir_json

            write_ir_json(bundle, path)
        case ".ort":
            from rlx_ort.converters.targets.ort_format import write_ort_format

            write_ort_format(bundle, path, options)
        case _ if options.device is not None:
            from rlx_ort.converters.targets.optimized import write_optimized

            write_optimized(bundle, path, options)
        case _:
            from rlx_ort.converters.targets.onnx_file import write_onnx

            write_onnx(bundle, path, options)
