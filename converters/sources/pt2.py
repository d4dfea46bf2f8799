"""Exported programs of PyTorch (`.pt2`) as bundles, without unpickling or executing anything that is in the file."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rlx_ort.converters.bundle import ModelBundle
from rlx_ort.converters.extras import optional_module
from rlx_ort.converters.sources.pt2_check import checked_config, checked_program
from rlx_ort.converters.sources.torch_module import export_program, quiet
from rlx_ort.errors import ConversionError

__all__ = ["open_pt2"]

_IN_MEMORY_BYTES = 256 << 20
_MAX_TABLE_BYTES = 1 << 30
_MAX_MEMBERS = 1 << 20
_PROGRAM = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_TABLES = {
    "data/weights/": ("data/weights/model_weights_config.json", "the weights"),
    "data/constants/": ("data/constants/model_constants_config.json", "the constants"),
}
_PLAIN = re.compile(
    r"archive_format|archive_version|byteorder|\.data/version|data/(weights/weight|constants/tensor)_\d+"
)


def open_pt2(path: Path, *, opset: int | None = None) -> ModelBundle:
    """Return an exported program as a bundle, through PyTorch's own ONNX exporter.

    PyTorch gets a copy of the archive that holds the program, checked, and its weights as plain bytes: no pickle, no
    guard, no compiled library. The copy is in memory up to 256 MiB, then in a temporary file. Takes seconds for a
    small program.

    Args:
        path: a file that `torch.export.save` of torch 2.8 or newer wrote.
        opset: the ai.onnx opset; None leaves it to PyTorch.

    Raises:
        ConversionError: the file is damaged, needs something unpickled or executed, or holds an operator that is not
            known to be harmless; or torch or onnxscript is not installed, or cannot read or export the program.
    """
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as copy:
        try:
            with zipfile.ZipFile(path) as archive:
                _copy_checked(archive, copy, path.stat().st_size)
        except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError, KeyError) as err:
            raise ConversionError(f"{path} is no whole exported program: {err}") from err
        except ConversionError as err:
            raise ConversionError(f"{path}: {err}") from err
        copy.seek(0)
        torch = optional_module("torch", "torch", "reading an exported program of PyTorch")
        try:
            with quiet():
                program = torch.export.load(copy)
        except Exception as err:  # PyTorch raises errors of many kinds here, AssertionError among them
            raise ConversionError(
                f"{path}: PyTorch {torch.__version__} cannot read the program: {type(err).__name__}: {err}; a program "
                "is best read by the version that wrote it"
            ) from err
    return export_program(program, str(path), opset)


def _copy_checked(archive: zipfile.ZipFile, copy: IO[bytes], size: int) -> None:
    """Copy the harmless members of an archive to another one.

    Raises:
        ConversionError: a member is missing or not harmless.
    """
    members = dict(_members(archive, size))
    if "serialized_exported_program.json" in members or _PROGRAM not in members:
        raise ConversionError(
            "it has no models/model.json, as torch.export.save of torch 2.8 and newer writes it; older ones kept their "
            "weights as pickles. Save the program again with a newer torch"
        )
    new = {_PROGRAM: checked_program(_read(archive, members[_PROGRAM])), _SAMPLES: b""}
    for folder, (table, what) in _TABLES.items():
        if table not in members:
            raise ConversionError(f"it has no {table}: its weights are pickles of an older torch; save it again")
        config = checked_config(_read(archive, members[table]), what)
        for name, entry in config.items():
            if f"{folder}{entry['path_name']}" not in members:
                raise ConversionError(f"{what}: the bytes of {name!r} are missing")
        new[table] = json.dumps({"config": config}).encode("utf-8")
    with zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as target:
        for name, text in new.items():
            target.writestr(f"program/{name}", text)
        for name, info in members.items():
            if _PLAIN.fullmatch(name):
                with archive.open(info) as source, target.open(f"program/{name}", "w", force_zip64=True) as stream:
                    shutil.copyfileobj(source, stream, 1 << 20)


def _members(archive: zipfile.ZipFile, size: int) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    """Yield the members by their name below the archive's one folder."""
    infos = archive.infolist()
    roots = {info.filename.partition("/")[0] for info in infos}
    if len(infos) > _MAX_MEMBERS or sum(info.file_size for info in infos) > size:
        raise ConversionError("its members are larger than the file; PyTorch does not compress what it saves")
    if len({info.filename for info in infos}) != len(infos):
        raise ConversionError("it has a member twice")
    for info in infos:
        inner = info.filename.partition("/")[2] if len(roots) == 1 else info.filename
        yield inner, info


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    if info.file_size > _MAX_TABLE_BYTES:
        raise ConversionError(f"{info.filename} has {info.file_size} bytes, at most {_MAX_TABLE_BYTES} are read")
    return archive.read(info)
