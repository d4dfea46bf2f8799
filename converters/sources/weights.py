"""`read_weights`: any weight file as a mapping of names to tensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal, TypeAlias

from rlx_ort.converters.sources.detect import Format, format_of
from rlx_ort.converters.sources.weight_file import WeightFile
from rlx_ort.errors import ConversionError
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.tensor_file import read_tensors

__all__ = ["GgufAs", "read_sharded", "read_weights"]

GgufAs: TypeAlias = Literal["f32", "f16", "packed"]
"""What quantised tensors of a GGUF file are read as: floats, or their blocks as bytes `(rows, row bytes)`."""


def read_weights(path: str | os.PathLike[str], *, gguf_as: GgufAs = "f32") -> WeightFile:
    """Return the tensors of a weight file by name; the content decides what it is, not the name.

    Tensors of safetensors files, stored members of npz archives, initializers of ONNX models and plain tensors of
    GGUF files are mapped, not read. Compressed and quantised ones are made when they are asked for.

    Args:
        path: safetensors, an index of safetensors files, npz, GGUF, or an ONNX model, whose initializers are taken.
        gguf_as: what quantised tensors of a GGUF file are read as.

    Raises:
        ConversionError: there is no such file, it holds no weights or damaged ones, names files outside its folder,
            or a package it needs is not installed.
    """
    file = Path(path)
    kind, detail = format_of(file)
    match kind:
        case Format.SAFETENSORS:
            from rlx_ort.ir.tensor_file import read_tensors

            return WeightFile.of(str(file), read_tensors(file)[0])
        case Format.SAFETENSORS_INDEX:
            return read_sharded(file)
        case Format.NPZ:
            from rlx_ort.converters.sources.npz import read_npz

            return read_npz(file)
        case Format.GGUF:
            from rlx_ort.converters.sources.gguf_file import read_gguf

            return read_gguf(file, gguf_as)
        case Format.ONNX:
            return _initializers(file)
    what = detail if kind is Format.FOREIGN else kind.value
    if kind in (Format.PICKLE, Format.TORCH_PICKLE, Format.TORCHSCRIPT):
        what += (
            ". Reading one runs code that is in the file, so that is never done. Where you trust it, load it in "
            "PyTorch yourself and save its weights with safetensors.torch.save_file"
        )
    elif kind is Format.UNKNOWN:
        what += f": {detail}"
    raise ConversionError(f"{file} is {what}; known weight files are safetensors, npz, GGUF and ONNX")


def _initializers(path: Path) -> WeightFile:
    from rlx_ort.converters.from_onnx.tensor_files import ExternalFiles
    from rlx_ort.converters.from_onnx.tensors import tensor_data
    from rlx_ort.converters.sources.open import open_onnx

    bundle = open_onnx(path)
    inside = {
        tensor.name: tensor_data(tensor, ExternalFiles(None))
        for tensor in bundle.proto.graph.initializer
        if tensor.name not in bundle.weights
    }
    return WeightFile.of(str(path), {**bundle.weights, **inside})


_INDEX_LIMIT_BYTES = 256 << 20


def read_sharded(path: Path) -> WeightFile:
    """Return the tensors that an index names, mapped from the files beside it.

    The index is JSON with an entry `weight_map`, name -> file:
    https://huggingface.co/docs/safetensors/metadata_parsing. Files must be in the folder of the index.

    Raises:
        ConversionError: the index is damaged or names a file outside its folder, or a file lacks a tensor.
    """
    places = _weight_map(path)
    shards: dict[str, dict[str, TensorData]] = {}
    for name in sorted(set(places.values())):
        shards[name] = read_tensors(_beside(path, name))[0]
    lacking = [tensor for tensor, file in places.items() if tensor not in shards[file]]
    if lacking:
        shown = ", ".join(f"{tensor} in {places[tensor]}" for tensor in lacking[:8])
        raise ConversionError(f"{path}: the index names tensors that are not where it says: {shown}; download it anew")
    return WeightFile.of(str(path), {tensor: shards[file][tensor] for tensor, file in places.items()})


def _weight_map(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > _INDEX_LIMIT_BYTES:
            raise ConversionError(f"{path} is above {_INDEX_LIMIT_BYTES >> 20} MiB, which no index needs")
        document = json.loads(path.read_text(encoding="utf-8"))
        places = document["weight_map"]
        if not all(isinstance(name, str) and isinstance(file, str) for name, file in places.items()):
            raise TypeError("its weight_map maps to other things than file names")
    except OSError as err:
        raise ConversionError(f"{path} cannot be read: {err}") from err
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ConversionError(f"{path} is no index of safetensors files: {err}") from err
    return dict(places)


def _beside(index: Path, name: str) -> Path:
    """Return the path of a shard; a name that has any path in it, or is a link out of the folder, is refused."""
    if not name or name in (".", "..") or any(mark in name for mark in "/\\:\0"):
        raise ConversionError(f"{index}: the index names the file {name!r}; it must be one in the same folder")
    try:
        folder = index.parent.resolve(strict=True)
        path = (folder / name).resolve(strict=True)
    except (OSError, RuntimeError) as err:  # RuntimeError: a loop of symbolic links, before Python 3.13
        raise ConversionError(f"{index}: the index names the file {name!r}, which cannot be read: {err}") from err
    if path.parent != folder and not path.is_relative_to(folder):
        raise ConversionError(
            f"{index}: the file {name!r} is a link that leaves {folder}; copy the files themselves there"
        )
    if not path.is_file():
        raise ConversionError(f"{index}: {name!r} is no regular file")
    return path
