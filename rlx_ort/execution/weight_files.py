"""Weights from safetensors files, mapped and not read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlx_ort.errors import ParamError
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.tensor_file import read_tensors

if TYPE_CHECKING:
    from rlx_ort.execution.weights import WeightStore

__all__ = ["LoadReport", "load_safetensors"]


@dataclass(frozen=True)
class LoadReport:
    """What a file had for the parameters.

    Attributes:
        loaded: parameters that got their data from it.
        missing: parameters that it does not have.
        unused: tensors of it that are no parameter, or that `rename` left out.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


def load_safetensors(
    store: WeightStore, path: Path, rename: Callable[[str], str | None] | None, strict: bool
) -> LoadReport:
    """Give a store the tensors of a file; see `WeightStore.load_safetensors`.

    Raises:
        ConversionError: the file cannot be read, or is no safetensors file.
        ParamError: a tensor does not fit its parameter, two are one parameter, or, when strict, one is left over.
    """
    tensors, _ = read_tensors(path)
    sources: dict[str, str] = {}
    strangers, left_out = [], []
    for tensor in tensors:
        name = tensor if rename is None else rename(tensor)
        if name is None:
            left_out.append(tensor)
        elif name not in store:
            strangers.append(tensor if name == tensor else f"{tensor} (renamed to {name})")
        elif name in sources:
            raise ParamError(f"{path}: tensors {sources[name]!r} and {tensor!r} are both parameter {name!r}")
        else:
            sources[name] = tensor
    missing = [name for name in store.names if name not in sources]
    if strict and (missing or strangers):
        raise ParamError(_complaint(path, missing, strangers, store.names))
    with store.update():
        for name, tensor in sources.items():
            try:
                store.set(name, _aligned(tensors[tensor]))
            except ParamError as err:
                raise ParamError(f"{path}, tensor {tensor!r}: {err}") from err
    return LoadReport(tuple(sources), tuple(missing), (*strangers, *left_out))


def _aligned(data: TensorData) -> TensorData:
    """Return data whose first byte is where a processor wants an element; only odd headers make a copy needed."""
    step = 1 if data.dtype.is_packed else data.dtype.numpy.alignment
    if data.buffer.ctypes.data % max(step, 1) == 0:
        return data
    return TensorData(data.dtype, data.shape, np.array(data.buffer))


def _complaint(path: Path, missing: list[str], strangers: list[str], names: Iterable[str]) -> str:
    parts = []
    if missing:
        parts.append(f"it has nothing for the parameters {', '.join(map(repr, missing[:8]))}{_more(missing)}")
    if strangers:
        parts.append(f"no parameter takes its tensors {', '.join(map(repr, strangers[:8]))}{_more(strangers)}")
        close = difflib.get_close_matches(strangers[0], list(names), n=1)
        if close:
            parts.append(f"did you mean {close[0]!r} by {strangers[0]!r}? `rename` maps names")
    return f"{path}: {'; '.join(parts)}. strict=False loads what fits"


def _more(items: list[str], shown: int = 8) -> str:
    return f" and {len(items) - shown} more" if len(items) > shown else ""
