"""Sizes of sliding windows, for convolutions of any rank."""

from __future__ import annotations

from collections.abc import Sequence

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.op import Op
from rlx_ort.ir.shape import Dim

__all__ = ["counts", "window_count"]


def counts(what: str, value: int | Sequence[int], rank: int, least: int = 0) -> tuple[int, ...]:
    """Return a window attribute as one number an axis, given as one number for all or one for each.

    Raises:
        GraphVerifyError: there is another number of numbers, or one is below `least`.
    """
    numbers = (value,) * rank if isinstance(value, int) else tuple(int(number) for number in value)
    if len(numbers) != rank or min(numbers, default=least) < least:
        raise GraphVerifyError(f"{what} must be one or {rank} whole numbers of at least {least}, got {value}")
    return numbers


def window_count(op: Op, size: Dim, kernel: Dim, stride: int, padding: int, dilation: int) -> Dim:
    """Return how many places a window has along an axis, None when that cannot be told.

    Raises:
        GraphVerifyError: the window does not fit even once.
    """
    if not isinstance(size, int) or not isinstance(kernel, int):
        # A window of 1, or one with matching padding, keeps a dimension whatever its size is.
        keeps = isinstance(kernel, int) and stride == 1 and 2 * padding == dilation * (kernel - 1)
        return size if keeps else None
    places = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    if places < 1:
        raise GraphVerifyError(f"{op.describe()} leaves nothing of its input: a result would have size {places}")
    return places
