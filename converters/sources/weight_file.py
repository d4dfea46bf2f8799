"""`WeightFile`: the tensors of a weight file by name, each made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData

__all__ = ["WeightEntry", "WeightFile"]


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
