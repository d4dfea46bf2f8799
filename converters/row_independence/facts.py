"""The proven facts of values: sizes as products of symbols, the axis of the rows, and small contents."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

BATCH = "\0batch"  # no named dim is called so
ANYHOW = (-2,)
SMALL = 64  # elements of constants that are read: axes, sizes, scales
END = 1 << 31  # ends of slices from here on mean the last element


class RefusedError(Exception):
    """The proof ends."""

    node = ""


def refuse_if(fails: object, reason: str) -> None:
    """End the proof at the node that is followed, if a condition of its rule fails."""
    if fails:
        raise RefusedError(reason)


@dataclass(frozen=True)
class Size:
    """A product of a whole number and symbols, such as 12 * batch * tokens."""

    number: int
    symbols: tuple[str, ...] = ()

    def __mul__(self, other: Size) -> Size:
        return Size(self.number * other.number, tuple(sorted(self.symbols + other.symbols)))

    def __str__(self) -> str:
        return "*".join([str(self.number), *self.symbols])

    @property
    def batched(self) -> bool:
        """Whether it has the number of rows as a factor."""
        return any(BATCH in symbol for symbol in self.symbols)

    @property
    def whole(self) -> int | None:
        """The number where there are no symbols."""
        return None if self.symbols else self.number

    def over(self, other: Size) -> Size | None:
        """Return the quotient, with a symbol of its own where it is not a product.

        None if rows are in the dividend of that: 3 rows of 1 element are divisible by 3 though no row is.
        """
        if other.number and not self.number % other.number:
            number, below = self.number // other.number, 1
        else:
            number, below = self.number, other.number
        mine, theirs = Counter(self.symbols), Counter(other.symbols)
        above, rest = mine - theirs, theirs - mine
        if below == 1 and not rest:
            return Size(number, tuple(sorted(above.elements())))
        top, bottom = Size(number, tuple(sorted(above.elements()))), Size(below, tuple(sorted(rest.elements())))
        if top.batched or bottom.batched:
            return None
        return Size(1, (Quotient(top, bottom),))


class Quotient(str):
    """The symbol of a division, rounded down unless `exact` of the proof has it."""

    top: Size
    bottom: Size

    def __new__(cls, top: Size, bottom: Size) -> Quotient:
        """Return the symbol, which is that of each division of these two."""
        made = super().__new__(cls, f"({top}/{bottom})")
        made.top, made.bottom = top, bottom
        return made


class AtMost(str):
    """The symbol of a size that is another one, or less, as of a slice up to it."""

    bound: Size

    def __new__(cls, bound: Size, number: int) -> AtMost:
        """Return a symbol of its own."""
        made = super().__new__(cls, f"\0{number}<={bound}")
        made.bound = bound
        return made


ONE = Size(1)


def product(sizes: Sequence[Size]) -> Size:
    """Return the product of sizes."""
    return math.prod(sizes, start=ONE)


@dataclass(frozen=True)
class Value:
    """The proven facts of a value.

    Attributes:
        shape: its sizes, None if even the rank is open.
        axis: where the rows lie; None if the value is the same for every batch, but for sizes in `content`.
        content: the elements of small whole numbers of rank 0 or 1.
        cells: the same of a higher rank, in order, for a value without rows and independent of their number.
        data: the elements of a small constant.
        places: which columns, along the last axis, hold the row's number in the batch; (-1,) if all elements are
            that number times `stride`, plus an offset from 0 to less than `below` that is the same for all rows;
            `ANYHOW` if they are computed from it in any other way.
        stride: how far the elements of neighbouring rows are apart, with `places`.
        below: an upper bound of elements without rows, or offsets, none of them negative; None if not known.
    """

    shape: tuple[Size, ...] | None
    axis: int | None = None
    content: tuple[Size | None, ...] | None = None
    data: npt.NDArray[Any] | None = None
    places: tuple[int, ...] = ()
    stride: Size = ONE
    below: Size | None = None
    cells: tuple[Size | None, ...] | None = None

    @property
    def rank(self) -> int:
        """The number of axes; refuses an open one."""
        return len(self.dims)

    @property
    def dims(self) -> tuple[Size, ...]:
        """The sizes; refuses an open rank."""
        if self.shape is None:
            raise RefusedError("reads a value of open rank")
        return self.shape

    @property
    def sized(self) -> bool:
        """Whether elements depend on the number of rows."""
        return any(size is not None and size.batched for size in self.content or ())

    @property
    def differs(self) -> bool:
        """Whether the value has rows, or elements that depend on their number."""
        return self.axis is not None or self.sized

    @property
    def asked(self) -> tuple[Size, ...] | None:
        """The elements where all of them are known, as those of a shape that is asked for."""
        if self.content is None or None in self.content:
            return None
        return tuple([size for size in self.content if size is not None])

    @property
    def row_number(self) -> bool:
        """Whether all elements are the row's number itself."""
        return self.places == (-1,) and self.stride == ONE and self.below == ONE

    @property
    def rows(self) -> Size:
        """The size of the axis of rows; refuses a value without one."""
        if self.axis is None:
            raise RefusedError("reads a value without rows beside one with rows")
        return self.dims[self.axis]


def bound_of(size: Size) -> Size | None:
    """Return the size that this one is at most; None if none is known."""
    symbol = size.symbols[0] if size.number == len(size.symbols) == 1 else None
    return symbol.bound if isinstance(symbol, AtMost) else None


def is_no_size(left: Size, right: Size) -> bool:
    """Return whether one is negative and the other a product of sizes, which is not."""
    differences = any(symbol.startswith("(") and "-" in symbol for symbol in right.symbols)
    return left.whole is not None and left.whole < 0 and right.number >= 0 and not differences


def flattened(value: Value) -> Value:
    """Return a value whose content, if any, has rank 0 or 1, so that it is read in order; else it is in `cells`."""
    if value.content is None or (value.shape is not None and len(value.shape) < 2):
        return value
    refuse_sizes(value)
    return replace(value, content=None, cells=value.content if value.axis is None else None)


def grid_of(value: Value) -> npt.NDArray[Any] | None:
    """Return the cells in the value's shape; None if either is not known."""
    sizes = [size.whole for size in value.shape or ()]
    known = [size for size in sizes if size is not None]
    if value.cells is None or len(known) < len(sizes) or math.prod(known) != len(value.cells):
        return None
    grid = np.empty(len(value.cells), object)
    grid[:] = value.cells
    return grid.reshape(known)


def constant_value(array: npt.NDArray[Any]) -> Value:
    """Return the facts of a small constant."""
    content = None
    if array.dtype in (np.int32, np.int64) and array.ndim <= 1:
        content = tuple([Size(int(each)) for each in array.reshape(-1)])
    return Value(tuple(map(Size, array.shape)), content=content, data=array)


def axis_at(axis: int, rank: int) -> int:
    """Return an axis counted from the first; refuses one that is not there."""
    refuse_if(not -rank <= axis < rank, f"axis {axis} is none of {rank}")
    return axis % rank


def refuse_sizes(*values: Value, places: bool = False) -> None:
    """Refuse elements that depend on the number of rows, and with `places` on the row's number."""
    refuse_if(any(value.sized or (places and value.places) for value in values), "computes with the number of rows")


def refuse_places(value: Value) -> None:
    """Refuse elements that depend on the row's number."""
    refuse_if(value.places, "computes with the row's number")


def moved(given: Value, result: Value) -> Value:
    """Return the result of an operator that moves or repeats elements, with their proven facts."""
    if given.places != (-1,):
        refuse_places(given)
    if not given.places and result.axis is not None:
        return result
    return replace(result, places=given.places, stride=given.stride, below=given.below)
