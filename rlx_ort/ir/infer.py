"""Shape rules that several op families share: broadcasting, agreement of dimensions, counted axes."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, OpTypes, normal_axis, tensor_input
from rlx_ort.ir.shape import Dim, Shape, broadcast_shapes
from rlx_ort.ir.types import TensorType

__all__ = [
    "axis_tuple",
    "broadcast",
    "expect_dim",
    "expect_float",
    "expect_rank",
    "join_dims",
    "known_name",
    "pair",
    "reshaped",
    "same_dtype",
]


def known_name(what: str, name: str, known: Sequence[str]) -> str:
    """Return a name in lower case with underscores, if it is one of `known`.

    Raises:
        GraphVerifyError: it is not; the closest known name is suggested.
    """
    plain = name.strip().lower().replace("-", "_")
    if plain in known:
        return plain
    close = difflib.get_close_matches(plain, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise GraphVerifyError(f"unknown {what} {name!r}; {hint}known: {', '.join(known)}")


def pair(what: str, value: int | Sequence[int], least: int = 0) -> tuple[int, int]:
    """Return (height, width) of a window attribute given as one number or two.

    Raises:
        GraphVerifyError: there are not one or two numbers, or one is below `least`.
    """
    numbers = (value, value) if isinstance(value, int) else tuple(int(number) for number in value)
    if len(numbers) != 2 or min(numbers) < least:
        raise GraphVerifyError(f"{what} must be one or two whole numbers of at least {least}, got {value}")
    return numbers[0], numbers[1]


def axis_tuple(op: Op, axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """Return axes counted from the front, in order.

    Raises:
        GraphVerifyError: an axis does not exist or is named twice.
    """
    found = tuple(normal_axis(op, axis, rank) for axis in axes)
    if len(set(found)) != len(found):
        raise GraphVerifyError(f"{op.kind} names an axis twice: {tuple(axes)}")
    return found


def same_dtype(op: Op, inputs: OpTypes, names: Sequence[str]) -> DType:
    """Return the one dtype that the named inputs have.

    Raises:
        GraphVerifyError: they have different dtypes.
    """
    dtypes = [tensor_input(op, inputs, index, name).dtype for index, name in enumerate(names)]
    if len(set(dtypes)) > 1:
        found = ", ".join(f"{name} {dtype.value}" for name, dtype in zip(names, dtypes, strict=True))
        raise GraphVerifyError(f"{op.kind} needs inputs of one dtype, got {found}; cast them first")
    return dtypes[0]


def expect_float(op: Op, value: TensorType, name: str) -> None:
    """Check that a tensor holds real floating-point numbers.

    Raises:
        GraphVerifyError: it does not.
    """
    if not value.dtype.is_float:
        raise GraphVerifyError(f"{op.describe()} needs floating-point numbers, {name} is {value.dtype.value}; cast it")


def expect_rank(op: Op, value: TensorType, ranks: Sequence[int], name: str) -> Shape:
    """Return the shape of a tensor that must have one of the given ranks.

    Raises:
        GraphVerifyError: its rank is another one, or unknown.
    """
    if value.shape is None or value.shape.rank not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise GraphVerifyError(f"{op.kind} needs its input {name} with rank {wanted}, got {value}")
    return value.shape


def expect_dim(op: Op, found: Dim, wanted: Dim, what: str) -> None:
    """Check that two dimensions can be equal: a symbol against another size is taken to fit.

    Raises:
        GraphVerifyError: both are sizes and differ.
    """
    if isinstance(found, int) and isinstance(wanted, int) and found != wanted:
        raise GraphVerifyError(f"{op.kind} needs {what} to be {wanted}, got {found}")


def join_dims(dims: Iterable[Dim]) -> Dim:
    """Return the one dimension that equal dimensions share: a size if one is known, else a name if all agree."""
    found = list(dict.fromkeys(dims))
    sizes = [dim for dim in found if isinstance(dim, int)]
    if sizes:
        return sizes[0]
    return found[0] if len(found) == 1 else None


def broadcast(op: Op, shapes: Sequence[Shape | None]) -> Shape | None:
    """Return the broadcast shape, None when a rank is unknown.

    Raises:
        GraphVerifyError: two sizes differ and neither is 1.
    """
    known = [shape for shape in shapes if shape is not None]
    try:
        result = broadcast_shapes(known)
    except ValueError as err:
        raise GraphVerifyError(f"{op.kind}: {err}") from err
    return result if len(known) == len(shapes) else None


def reshaped(op: Op, source: Shape | None, target: Sequence[Dim]) -> Shape:
    """Return the shape of a reshape to `target`, in which one dimension may be -1 or None: what is left over.

    Symbols on both sides cancel, so `("batch", 12)` to `("batch", -1, 4)` gives 3 for the open dimension.

    Raises:
        GraphVerifyError: more than one dimension is open, or the numbers of elements cannot agree.
    """
    open_places = [place for place, dim in enumerate(target) if dim is None or dim == -1]
    if len(open_places) > 1:
        raise GraphVerifyError(f"{op.kind} to {list(target)}: at most one dimension may be -1")
    dims = [dim for place, dim in enumerate(target) if place not in open_places]
    if any(isinstance(dim, int) and dim < 0 for dim in dims):
        raise GraphVerifyError(f"{op.kind} to {list(target)}: a dimension is a size, a symbol or -1")
    open_dim = None if source is None else _left_over(op, source, dims, bool(open_places))
    return Shape(open_dim if place in open_places else dim for place, dim in enumerate(target))


def _left_over(op: Op, source: Shape, dims: Sequence[Dim], is_open: bool) -> Dim:
    """Return the dimension that is left when `source` is divided by `dims`, None when that cannot be told."""
    if not is_open and source == tuple(dims):
        return None
    before = Counter(dim for dim in source if not isinstance(dim, int))
    after = Counter(dim for dim in dims if not isinstance(dim, int))
    only_before, only_after = before - after, after - before
    size = math.prod(dim for dim in source if isinstance(dim, int))
    divisor = math.prod(dim for dim in dims if isinstance(dim, int))
    if None in before or only_after or sum(only_before.values()) > 1:
        return None
    if only_before:
        return next(iter(only_before)) if is_open and size == divisor else None
    fits = (divisor != 0 and size % divisor == 0) if is_open else size == divisor
    if not fits:
        hint = "; -1 cannot be told for an empty tensor, give its size" if is_open and size == divisor == 0 else ""
        raise GraphVerifyError(
            f"{op.kind} cannot turn {source} into {Shape(dims)}{' with -1' if is_open else ''}{hint}"
        )
    return size // divisor if is_open else None
