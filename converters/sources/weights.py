"""`WeightFile`: the tensors of a weight file by name, each made when it is asked for; weights in several files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData, read_tensors

__all__ = ["GgufAs", "WeightEntry", "WeightFile", "read_sharded"]

GgufAs: TypeAlias = Literal["f32", "f16", "packed"]
"""What quantised tensors of a GGUF file are read as: floats, or their blocks as bytes `(rows, row bytes)`."""
_INDEX_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """A tensor of a file, without its data.

    Attributes:
        dtype: the dtype it is read as.
        shape: the shape it is read as.
        load: returns the data; mapped where the file has it in this form, else in memory.
        stored_as: the file's name of its type where that is more specific: `Q4_K`.
        blocks: the tensor packed, u8 `(..., row bytes)`, where the IR can compute with it so.
    """

    dtype: DType
    shape: tuple[int, ...]
    load: Callable[[], TensorData]
    stored_as: str = ""
    blocks: TensorData | None = None


class WeightFile(Mapping[str, TensorData]):
    """The tensors of a weight file.

    Asking for one reads, unpacks or dequantises it unless the file can be mapped; nothing is kept, so ask once.
    """

    def __init__(self, origin: str, entries: Mapping[str, WeightEntry]) -> None:
        self.origin = origin
        self.entries = dict(entries)

    @classmethod
    def of(cls, origin: str, tensors: Mapping[str, TensorData]) -> WeightFile:
        """Return tensors that are there already as a weight file."""
        return cls(origin, {name: _entry(data) for name, data in tensors.items()})

    def __getitem__(self, name: str) -> TensorData:
        return self.entries[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"WeightFile({self.origin!r}, {len(self.entries)} tensors)"


def _entry(data: TensorData) -> WeightEntry:
    return WeightEntry(data.dtype, data.shape, lambda: data)


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
