"""`WeightFile`: the tensors of a weight file by name, each made when it is asked for; weights in several files.

`Renames`: from the names of tensors in a weight file to those of weights in a model.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData, read_tensors
from rlx_ort.storage import parse_json, read_regular

GgufAs: TypeAlias = Literal["f32", "f16", "packed"]
"""The form in which quantised tensors of a GGUF file are read: floats, or their blocks as bytes `(rows, row bytes)`."""
_INDEX_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """A tensor of a file, without its data; dtype and shape are those that it is read as.

    `load` returns the data; mapped where the file has it in this form, else in memory. `stored_as` is the file's name
    of its type where that is more specific: `Q4_K`. `blocks` is the tensor packed, u8 `(..., row bytes)`, where the IR
    can compute with it so.
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
        return cls(origin, {name: _held(data) for name, data in tensors.items()})

    def __getitem__(self, name: str) -> TensorData:
        return self.entries[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"WeightFile({self.origin!r}, {len(self.entries)} tensors)"


def _held(data: TensorData) -> WeightEntry:
    return WeightEntry(data.dtype, data.shape, lambda: data)


def read_sharded(path: Path) -> WeightFile:
    """Return the tensors that an index names, mapped from the files beside it.

    The index is JSON with an entry `weight_map`, name -> file:
    https://huggingface.co/docs/safetensors/metadata_parsing. Files must be in the folder of the index.

    Raises:
        ConversionError: the index is damaged or names a file outside its folder, or a file lacks a tensor.
    """
    places = _weight_map(path)
    shards = {name: read_tensors(_beside(path, name))[0] for name in sorted(set(places.values()))}
    lacking = [tensor for tensor, file in places.items() if tensor not in shards[file]]
    if lacking:
        shown = ", ".join(f"{tensor} in {places[tensor]}" for tensor in lacking[:8])
        raise ConversionError(f"{path}: the index names tensors that are not where it says: {shown}; download it anew")
    return WeightFile.of(str(path), {tensor: shards[file][tensor] for tensor, file in places.items()})


def _weight_map(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > _INDEX_LIMIT_BYTES:
            raise ConversionError(f"{path} is above {_INDEX_LIMIT_BYTES >> 20} MiB, which no index needs")
        document = parse_json(read_regular(path))
        places = document["weight_map"]
        if not all(isinstance(name, str) and isinstance(file, str) for name, file in places.items()):
            raise TypeError("its weight_map maps to other things than file names")
    except OSError as err:
        raise ConversionError(f"{path} cannot be read: {err}") from err
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConversionError(f"{path} is not an index of safetensors files: {err}") from err
    return dict(places)


def _beside(index: Path, name: str) -> Path:
    """Return the path of a shard; a name that has any path in it, or is a link out of the folder, is refused."""
    if not name or name in (".", "..") or any(mark in name for mark in "/\\:\0"):
        raise ConversionError(f"{index}: the index names the file {name!r}; it must be one in the same folder")
    try:
        folder = index.parent.resolve(strict=True)
        path = (folder / name).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as err:  # loops of links before Python 3.13; no text of the file system
        raise ConversionError(f"{index}: the index names the file {name!r}, which cannot be read: {err}") from err
    if not path.is_relative_to(folder):
        raise ConversionError(f"{index}: the file {name!r} is a link that leaves {folder}; copy the file itself there")
    if not path.is_file():
        raise ConversionError(f"{index}: {name!r} is not a regular file")
    return path


@dataclass(frozen=True, slots=True)
class Rename:
    r"""The name of a tensor in the model, and how it is stored there.

    Attributes:
        to: its name in the model; empty to leave it out. Of a pattern: a template in which `\1` or `\g<name>` stand
            for groups.
        transpose: whether its two axes are swapped: PyTorch has the matrix of a layer as `(outputs, inputs)`, a
            MatMul wants `(inputs, outputs)`.
    """

    to: str
    transpose: bool = False


@dataclass(frozen=True, slots=True)
class Renames:
    """Names and patterns, tried in this order; a tensor that none of them matches keeps its name.

    Attributes:
        names: name in the file -> rename.
        patterns: regular expressions, each for a whole name, the first that fits decides.
    """

    names: Mapping[str, Rename] = field(default_factory=dict)
    patterns: tuple[tuple[re.Pattern[str], Rename], ...] = ()

    @classmethod
    def of(
        cls, names: Mapping[str, str | Rename] | None = None, patterns: Iterable[tuple[str, str | Rename]] = ()
    ) -> Renames:
        """Return renames from plain texts.

        Raises:
            ConversionError: a pattern is no regular expression, or its template names a group that it lacks.
        """
        known = {name: _rename(to) for name, to in (names or {}).items()}
        return cls(known, tuple(_pattern(text, _rename(to)) for text, to in patterns))

    def __call__(self, name: str) -> Rename:
        """Return the rename of a tensor."""
        if name in self.names:
            return self.names[name]
        for pattern, rename in self.patterns:
            if match := pattern.fullmatch(name):
                return Rename(match.expand(rename.to), rename.transpose)
        return Rename(name)


def load_renames(path: str | os.PathLike[str]) -> Renames:
    r"""Read renames from a JSON or TOML file; the content decides which.

    Either the file maps names to names, or it has the entries `names` and `patterns`:

        [names]
        "lm_head.weight" = { to = "head", transpose = true }
        "rope.freqs" = ""  # left out

        [[patterns]]
        match = 'layers\.(\d+)\.(.*)'
        to = 'h.\1.\2'

    Raises:
        ConversionError: the file cannot be read, or is no such file.
    """
    file = Path(path)
    try:
        text = read_regular(file).decode("utf-8-sig")
        document: Any = parse_json(text) if text.lstrip()[:1] == "{" else tomllib.loads(text)
    except OSError as err:
        raise ConversionError(f"{file} cannot be read: {err}") from err
    except (ValueError, RecursionError) as err:  # the latter is of TOML
        raise ConversionError(f"{file} is not a rename file, which is JSON or TOML: {err}") from err
    try:
        grouped = set(document) <= {"names", "patterns"} and isinstance(document.get("names", {}), dict)
        names = document.get("names", {}) if grouped else document
        patterns = document.get("patterns", []) if grouped else []
        return Renames.of(
            {name: _entry(entry) for name, entry in names.items()},
            [(_text(item["match"]), _entry({k: v for k, v in item.items() if k != "match"})) for item in patterns],
        )
    except (TypeError, KeyError, AttributeError, ConversionError) as err:
        reason = f"it lacks {err}" if isinstance(err, KeyError) else err
        raise ConversionError(f"{file} is not a rename file: {reason}") from err


def _rename(to: str | Rename) -> Rename:
    return to if isinstance(to, Rename) else Rename(to)


def _entry(entry: Any) -> Rename:
    match entry:
        case None | False:
            return Rename("")
        case str():
            return Rename(entry)
        case {"to": str(to), **rest} if set(rest) <= {"transpose"}:
            transpose = rest.get("transpose", False)
            if isinstance(transpose, bool):
                return Rename(to, transpose)
    raise TypeError(f'{entry!r} is neither a name nor {{"to": name, "transpose": true or false}}')


def _text(item: Any) -> str:
    if not isinstance(item, str):
        raise TypeError(f"{item!r} is not a pattern")
    return item


def _pattern(text: str, rename: Rename) -> tuple[re.Pattern[str], Rename]:
    try:
        pattern = re.compile(text)
        # The template is tried on an expression that has the same groups and matches anything.
        re.compile(f"(?:{text})|").fullmatch("").expand(rename.to)  # type: ignore[union-attr]  # it matches
    except (re.error, IndexError) as err:
        raise ConversionError(f"pattern {text!r} -> {rename.to!r}: {err}") from err
    return pattern, rename
