"""What is measured in one session: a chain of an op, and the sizes it is timed at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlx_ort.execution.options import CompileOptions
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph

__all__ = ["Point", "Series", "computing"]

_LEAST_LINKS = 2


class Point(NamedTuple):
    """A size at which a series is measured.

    Attributes:
        shape: the shape of the chain's large tensor.
        size: what the row says.
        work: a number that grows as the time of a link does, by which the next size's time is foreseen.
        flops: the floating-point operations of a link where they are what takes the time.
    """

    shape: tuple[int, ...]
    size: tuple[int, ...]
    work: float
    flops: float = 0.0


def computing(shape: tuple[int, ...], size: tuple[int, ...], flops: float) -> Point:
    """Return a point of an op whose operations are what takes the time."""
    return Point(shape, size, flops, flops)


@dataclass(frozen=True, slots=True)
class Series:
    """One session and the sizes that it is timed at.

    Attributes:
        probe: the name of its rows.
        build: the number of links -> the graph.
        points: the sizes; they are measured from the least work to the most.
        links: the least number of links in the chain.
        dtype: the element type of the chain.
        label: the dtype that the rows say.
        options: how its session is compiled.
        nodes: the nodes of a link that share its time.
        companion: a probe whose rows are what else a link does, to be subtracted.
        feeds: gives more inputs for a shape.
        stretched: whether the chain is made longer where a round trip is long.
        trips: round trips that a stretched chain of short work takes on an accelerator, since they drift by a third.
        shortened: whether the chain is made shorter where a few links take long enough.
        once: whether it is not measured a second time, since opening it takes longer than its runs.
    """

    probe: str
    build: Callable[[int], Graph]
    points: tuple[Point, ...]
    links: int = 8
    dtype: DType = DType.F32
    label: str = "f32"
    options: CompileOptions | None = None
    nodes: int = 1
    companion: str = ""
    feeds: Callable[[tuple[int, ...]], Mapping[str, Any]] | None = None
    stretched: bool = True
    trips: int = 3
    shortened: bool = True
    once: bool = False

    def fitting(self, count: int, link_ns: float, limit_ns: float) -> int:
        """Return how many links a chain should have that takes so long a link: fewer where a few are long enough."""
        if count > self.links and link_ns * count > limit_ns:
            count = self.links
        while self.shortened and count > _LEAST_LINKS and link_ns * count > 2 * limit_ns:
            count = max(count // 2 // 2 * 2, _LEAST_LINKS)
        return count
