"""Operators that move memory: one series each, over the number of elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx_ort.calibration.operator_graphs import NODES_A_LINK, elementwise
from rlx_ort.calibration.row_lengths import USUAL
from rlx_ort.calibration.series import Point, Series
from rlx_ort.execution.options import CompileOptions, OptimizationLevel

__all__ = [
    "BY_ROW",
    "COLUMNS",
    "COLUMNS_ALIGNED",
    "COLUMNS_WIDE",
    "CORE_OPERATORS",
    "MORE_OPERATORS",
    "by_row",
    "operator",
]

CORE_OPERATORS = (
    "Add",
    "Tanh",
    "Softmax",
    "LayerNormalization",
    "Gather",
    "TransposeRows",
    "ReduceMean",
    "Concat",
    "AddRow",
    "Transpose",
)
"""The operators that are measured before anything is measured finely, most important first."""

MORE_OPERATORS = (
    "Relu",
    "Mul",
    "Sigmoid",
    "Gelu",
    "Erf",
    "Exp",
    "Sin",
    "Pow",
    "Where",
    "Cast",
    "Div",
    "Sqrt",
    "Reshape",
)
"""The others that have rows of their own; what is in neither list is priced like one of these."""

COLUMNS = ("MaxColumns", "SumColumns")
"""What is reduced over an axis before the last one: on two cores a sum took 3 times, a maximum 8 times as long as over
the last axis."""

COLUMNS_NARROW, COLUMNS_WIDE, COLUMNS_ALIGNED = 250, 2000, 2048
"""The columns of tensors, of which the narrow ones stand for the usual row.

Each core reads its columns of every row, in longer pieces the wider a row is. Rows that are a multiple of a page apart
take each other's place in a cache: on 16 cores a maximum over 4 million elements took 1.46 ms in rows of 2048, 0.48 ms
in rows of 2000, and 0.77 ms in rows of 256.
"""

BY_ROW = ("LayerNormalization", "Softmax", "ReduceMean", "Gather", "Concat")
"""The operators whose time depends on how long a row is."""

_ROW = 64  # what a head of attention moves at once
_COMPANIONS = dict.fromkeys(("ReduceMean", *COLUMNS), "dispatch")
"""A tiny addition is measured with it in a link, and subtracted."""


def operator(name: str, counts: tuple[int, ...], *, added: bool = False) -> Series:
    """Return the series of an operator over so many elements; the engine optimises nothing away.

    With `added`, a lookup is measured in turn with an addition of as many elements, which is subtracted. On 16 cores
    3,000 rows of 300 took 70 us to look up in what had just been looked up, and 100 us in what had just been added. On
    an accelerator both wait for their launch, and the difference is noise: 1.0 to 10.4 us in five runs on CUDA, where a
    lookup takes 3.8.
    """
    points = tuple(Point(_shape(name, count), (count,), float(count)) for count in counts)
    return _series(f"op:{name}", name, COLUMNS_NARROW if name in COLUMNS else USUAL, points, added=added)


def by_row(name: str, length: int, counts: tuple[int, ...], *, added: bool = False) -> Series:
    """Return the series of an operator over so many elements in rows of another length; `added` as in `operator`."""
    points = tuple(Point((count // length, length), (count, length), float(count)) for count in counts)
    return _series(f"rows:{name}", name, length, points, added=added)


def _series(probe: str, name: str, width: int, points: tuple[Point, ...], *, added: bool) -> Series:
    in_turn = added and name == "Gather"
    return Series(
        probe,
        lambda links: elementwise("GatherAdded" if in_turn else name, links, width),
        points,
        4 if name in NODES_A_LINK or name in COLUMNS else 8,
        options=CompileOptions(optimization=OptimizationLevel.OFF),
        nodes=NODES_A_LINK.get(name, 1),
        companion="op:Add" if in_turn else _COMPANIONS.get(name, ""),
        feeds=_rows if name == "Gather" else None,
    )


def _shape(name: str, count: int) -> tuple[int, ...]:
    if name == "TransposeRows":
        return 8, count // (8 * _ROW), _ROW
    if name in COLUMNS:
        return count // COLUMNS_NARROW, COLUMNS_NARROW
    return count // USUAL, USUAL


def _rows(shape: tuple[int, ...]) -> dict[str, Any]:
    return {"rows": np.random.default_rng(0).permutation(shape[0]).astype(np.int64)}
