"""Runs the graph of a seed in every way and says of each case whether it is equal, refused, wrong or an untyped error.

A case is one graph in one way at one size: each way gets three calls, of which the second has other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import device_facts
import numpy as np
from interpreter import Array

from generated.graphs import STEPS_AT_MOST, Made, made_of
from generated.ways import COSTLY, WAYS, NotThisWayError, Opened
from rlx_ort import Device, DType, RlxError

__all__ = ["CALLS", "LEAVES", "STUCK_S", "Failure", "Judgement", "judged", "kinds_in", "shrunk"]

CALLS = (0, 1, 2)
STUCK_S = 120.0
"""How long one way may take."""
LEAVES = {"Input", "Param", "Constant", "Capture"}
"""Kinds of the nodes that compute nothing."""


@dataclass(frozen=True)
class Failure:
    """A case that went wrong.

    Attributes:
        verdict: `WRONG`, `UNTYPED` (an error that is no `RlxError`), or `CRASH` of the process.
        seed: the seed of the graph.
        way: the way of running.
        text: what was found and what was expected.
        kinds: the kinds of the ops of the graph.
        graph: the graph as text.
        skip: the steps left out of the graph.
        outputs: the outputs kept; None for all.
    """

    verdict: str
    seed: int
    way: str
    text: str
    kinds: tuple[str, ...] = ()
    graph: str = ""
    skip: tuple[int, ...] = ()
    outputs: tuple[int, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON holds them."""
        return asdict(self)


@dataclass
class Judgement:
    """What came of the graph of a seed.

    Attributes:
        ways: way -> verdict -> the number of cases.
        failures: the cases that went wrong.
        kinds: the kinds of the ops of the graph.
        dtypes: the dtypes of its values.
    """

    ways: dict[str, dict[str, int]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)

    def note(self, way: str, verdict: str) -> None:
        """Count a case."""
        counts = self.ways.setdefault(way, {})
        counts[verdict] = counts.get(verdict, 0) + 1


def judged(
    device: Device,
    seed: int,
    skip: Sequence[int] = (),
    outputs: Sequence[int] | None = None,
    ways: Iterable[str] = (),
    starting: Callable[[str], None] = lambda way: None,
    spoil: bool = True,
    most: int = len(WAYS),
) -> Judgement:
    """Run the graph of a seed in some ways, by default in those that this seed takes, `most` of them at most.

    `starting` is called with the name of each way before it begins; with `spoil` the arrays that parameters and
    constants came from are overwritten before the first run.
    """
    result = Judgement()
    starting("import")
    try:
        made, clean = made_of(seed, skip, outputs), made_of(seed, skip, outputs)
    except RlxError:
        result.note("import", "refused")
        return result
    except Exception as err:
        result.note("import", "UNTYPED")
        result.failures.append(Failure("UNTYPED", seed, "import", f"{type(err).__name__}: {str(err)[:300]}"))
        return result
    if spoil:
        made.spoil_sources()
    result.kinds = sorted(kinds_in(made))
    result.dtypes = sorted({kind.dtype.value for node in made.graph.nodes for kind in _tensors(node)})
    about = tuple(result.kinds), str(made), tuple(skip), tuple(outputs) if outputs else None
    starting("reference")
    expected = [clean.expected(call) for call in CALLS]
    inputs = [clean.feeds(call) for call in CALLS]
    bounds = _bounds(device, made)
    opened = Opened(device, made.graph)
    try:
        for way in list(ways) or _ways_of(seed)[:most]:
            starting(way)
            for call in CALLS:
                try:
                    feeds = {name: array.copy() for name, array in inputs[call].items()}
                    verdict, text = _verdict(opened, made, way, feeds, expected[call], bounds)
                except NotThisWayError:
                    continue
                result.note(way, verdict)
                if verdict in ("WRONG", "UNTYPED"):
                    result.failures.append(Failure(verdict, seed, way, f"call {call}: {text}", *about))
                    break
    finally:
        starting("close")
        opened.close()
    return result


def _ways_of(seed: int) -> list[str]:
    """Return the ways of a seed in an order of its own; `run` comes first in half of them."""
    rng = np.random.default_rng([seed, 4])
    found = [name for name in WAYS if name != "run" and rng.integers(COSTLY.get(name, 1)) == 0]
    order = [found[index] for index in rng.permutation(len(found))]
    return ["run", *order] if rng.random() < 0.5 else [*order, "run"]


def _verdict(
    opened: Opened, made: Made, way: str, feeds: dict[str, Array], expected: list[Array] | None, bounds: list[float]
) -> tuple[str, str]:
    kept = {name: array.copy() for name, array in feeds.items()} if made.second is not None else {}
    try:
        found = WAYS[way](opened, feeds)
    except NotThisWayError:
        raise
    except RlxError:
        return "refused", ""
    except Exception as err:
        return "UNTYPED", f"{type(err).__name__}: {str(err)[:300]}"
    for array in feeds.values():
        array[...] = np.asarray(99).astype(array.dtype)  # the caller uses its arrays for something else
    if expected is None:  # the second reference alone is no judge: that of ONNX is wrong for old versions of operators
        other = made.second(kept) if made.second is not None else None
        agrees = other is not None and not _difference(found, other, made, bounds)
        return ("equal" if agrees else "unjudged"), ""
    wrong = _difference(found, expected, made, bounds)
    if wrong and made.second is not None:
        other = made.second(kept)
        wrong = wrong if other is None else _difference(found, other, made, bounds) and wrong
    return ("WRONG", wrong) if wrong else ("equal", "")


def _difference(found: Sequence[Any], expected: Sequence[Array], made: Made, bounds: Sequence[float]) -> str:
    """Return where results differ from those expected, or an empty text."""
    try:
        for index, (value, result, wanted) in enumerate(zip(made.graph.outputs, found, expected, strict=True)):
            _compare(f"output {index}", value.dtype, np.asarray(result), wanted, bounds[index], made.size)
    except (AssertionError, ValueError) as err:
        return " ".join(str(err).split())[:500]
    return ""


def _compare(what: str, dtype: DType, result: Array, expected: Array, bound: float, size: float) -> None:
    if result.shape != expected.shape or DType.from_numpy(result.dtype) is not dtype:
        raise AssertionError(f"{what} is {result.dtype}{result.shape}, not {dtype.value}{expected.shape}")
    if not dtype.is_float:
        if not np.array_equal(result, expected.astype(result.dtype)):
            raise AssertionError(f"{what} is {result.tolist()}, not {expected.tolist()}")
        return
    with np.errstate(over="ignore"):
        cast = expected.astype(dtype.numpy)
    if np.array_equal(result, cast):
        return
    wide = cast.astype(np.float64)
    rounded = np.where(np.isinf(wide), wide, expected)  # what is just above the largest value rounds down to it
    finite = np.abs(rounded[np.isfinite(rounded)])
    floor = bound * max(float(finite.max(initial=0)), size)
    np.testing.assert_allclose(result.astype(np.float64), rounded, rtol=bound, atol=floor, err_msg=what)


def _bounds(device: Device, made: Made) -> list[float]:
    """Return the largest relative error of each output: that of the narrowest float dtype in the graph."""
    inner = {kind.dtype for node in made.graph.nodes for kind in _tensors(node)}
    return [
        max((device_facts.bound(device, kind) for kind in {value.dtype, *inner} if kind.is_float), default=0.0)
        * made.loose
        for value in made.graph.outputs
    ]


def _tensors(node: Any) -> list[Any]:
    return [kind for kind in node.types if hasattr(kind, "dtype")]


def kinds_in(made: Made) -> set[str]:
    """Return the kinds of the ops of a graph, leaves left out."""
    return {node.op.kind for node in made.graph.nodes} - LEAVES


def shrunk(fails: Callable[[tuple[int, ...], tuple[int, ...] | None], bool], seed: int) -> tuple[Any, Any]:
    """Return the steps to skip and the outputs to keep of the smallest graph of a seed that still fails."""
    skip: tuple[int, ...] = ()
    outputs: tuple[int, ...] | None = None
    if seed % 4 != 1:
        for step in range(STEPS_AT_MOST):
            if fails((*skip, step), outputs):
                skip = (*skip, step)
    count = len(made_of(seed, skip).graph.outputs)
    kept = list(range(count))
    for index in range(count):
        fewer = tuple(i for i in kept if i != index)
        if fewer and fails(skip, fewer):
            kept, outputs = list(fewer), fewer
    return skip, outputs
