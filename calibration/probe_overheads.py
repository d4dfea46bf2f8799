"""What a run costs before it computes: the round trip, launches, inputs, outputs, transfers, and opening a session."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx_ort.calibration import run_graphs as graphs
from rlx_ort.calibration.prober import FAILURES, Prober
from rlx_ort.calibration.profile import Sample
from rlx_ort.calibration.timing import Timed
from rlx_ort.device import Device
from rlx_ort.errors import RunError
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.types import TensorType

__all__ = ["again", "anchor", "overheads", "transfers"]

_SMALL = 4  # elements of a small tensor
_EXTRA = 7  # more inputs, or outputs, than the smallest graph has
_ROUNDS = 3
_QUICK_SIZES = 4  # of a transfer, up to 64 KiB


def anchor(prober: Prober) -> CompiledGraph:
    """Return the smallest graph, compiled, to be kept open while the device is measured.

    Some providers give up the device when their last session closes, and the next one has to find it and build its
    kernels again (WebGPU: 63 ms against 2 ms for a session, measured on an H200).
    """
    compiled = prober.compile(_tiny_chain(1))
    compiled.run({"x": np.ones(_SMALL, np.float32)})
    return compiled


def overheads(prober: Prober) -> None:
    """Measure the round trip, the launch slope, small inputs and outputs, and opening sessions.

    Raises:
        RunError: the clock stands still.
    """
    begun = prober.budget.elapsed_ns
    links = 32 if prober.quick else 64
    clock = prober.budget.clock
    prober.compile(_tiny_chain(1)).close()  # the first session of a device pays for what all of them share
    start = clock()
    prober.compile(_tiny_chain(1)).close()
    session_ns = max(clock() - start, 1)
    start = clock()
    prober.compile(_tiny_chain(links + 1)).close()
    long_session_ns = clock() - start
    prober.rows.append(Sample("session", (), float(session_ns)))
    prober.rows.append(Sample("session_node", (), max(long_session_ns - session_ns, 0) / links))
    prober.rows += _small_costs(prober, links)
    prober.account("overheads", begun)


def again(prober: Prober) -> None:
    """Measure the round trip and what goes with it once more, and keep the quicker of each.

    A device that has just been woken takes longer to start work, and nothing ever makes it quicker than it is.
    """
    begun = prober.budget.elapsed_ns
    if 2 * prober.spent.get("overheads", 0.0) * 1e9 < prober.budget.limit_ns - begun:
        prober.hurried = False  # a few runs of a session that has just been opened would be the slow ones
        prober.once_more(lambda: prober.rows.extend(_small_costs(prober, 32 if prober.quick else 64)))
    prober.account("overheads", begun)


def _small_costs(prober: Prober, links: int) -> list[Sample]:
    """Return the rows of the round trip, the launch slope, and one more small input and output."""
    kept, prober.rows = prober.rows, []
    try:
        single, chain, *more = _in_turn(
            prober,
            [_tiny_chain(1), _tiny_chain(links + 1), graphs.transfers(1 + _EXTRA, 1), graphs.transfers(1, 1 + _EXTRA)],
        )
        if single is None or chain is None:
            raise RunError(f"the clock stands still on {prober.device.display}: nothing can be measured")
        prober.add("roundtrip", (), single)
        prober.add("dispatch", (), chain, base_ns=single.ns, share=links)
        dispatch_ns = max((chain.ns - single.ns) / links, 0.0)
        prober.launches(single.ns, dispatch_ns)
        for probe, found in zip(("tensor_in", "tensor_out"), more, strict=True):
            prober.add(probe, (), found, base_ns=single.ns + _EXTRA * dispatch_ns, share=_EXTRA)
        return prober.rows
    finally:
        prober.rows = kept


def _in_turn(prober: Prober, tiny: Sequence[Graph]) -> list[Timed | None]:
    """Return the time of each of some graphs, the quickest of a few rounds in which each is timed a short while.

    What counts is their differences of a microsecond or so. Timed one after the other, an input more took 0.4 to 2.8 us
    on 16 cores, by what the machine did meanwhile. None of them has work for more than one core, so that the others'
    threads are at rest.
    """
    found: list[Timed | None] = [None] * len(tiny)
    with contextlib.ExitStack() as stack:
        ready = []
        for graph in tiny:
            compiled = prober.compile(graph)
            stack.callback(compiled.close)
            ready.append((compiled, {value.name: np.ones(_SMALL, np.float32) for value in graph.inputs}))
        for at_round in range(_ROUNDS):
            prober.await_calm()
            for at, (compiled, feeds) in enumerate(ready):
                timed, best = prober.time(compiled, feeds, fresh=not at_round), found[at]
                if timed is not None and (best is None or timed.ns < best.ns):
                    found[at] = timed
    return found


def transfers(prober: Prober, deadline_ns: float) -> None:
    """Measure what a large input or output takes beyond a small one, each size in one session."""
    counts = (1 << 8, 1 << 18) if prober.quick else (1 << 8, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
    begun = prober.budget.elapsed_ns
    try:
        _transfer_sizes(prober, graphs.upload(), "upload", counts, deadline_ns)
        if prober.device.kind == Device.CPU.kind:
            # One thread takes far longer to make a large tensor than to hand it out, so all threads turn an input here.
            bare = _transfer_sizes(prober, graphs.turned_sign(whole=False), "", counts, deadline_ns)
            graph, making = graphs.turned_sign(whole=True), lambda count: bare.get(count, math.inf)
        else:
            graph, making = graphs.readback(), lambda count: prober.frames.of((count,))
        _transfer_sizes(prober, graph, "readback", counts, deadline_ns, making)
    except FAILURES as err:
        prober.skipped["transfers"] = str(err).splitlines()[0]
    prober.account("transfers", begun)


def _transfer_sizes(
    prober: Prober,
    graph: Graph,
    probe: str,
    counts: Sequence[int],
    deadline_ns: float,
    making: Callable[[int], float] = lambda count: 0.0,
) -> dict[int, float]:
    """Return the time of each size, and keep rows of what it takes beyond a small one and making the tensor.

    What is quick is timed twice: the first runs of a session were up to 20 us slower than later ones on an H200, and a
    small tensor that came out so would be subtracted from all others.
    """
    compiled = prober.compile(graph)
    found: dict[int, Timed] = {}
    made: dict[int, float] = {}
    try:
        for count in (_SMALL, *counts):
            last = max(found, default=count)
            last_ns = found[last].ns if found else 0.0
            expected_ns = last_ns * (count / last if last > _SMALL else 1.0)
            if expected_ns > 8 * prober.budget.point_ns or not prober.budget.fits(deadline_ns, 3 * expected_ns):
                prober.skipped[probe or "readback"] = f"no time for {count * 4} bytes"
                break
            made[count] = making(count)
            timed = prober.time(compiled, _large(graph, count), least=5, fresh=not found)
            if timed is None:
                break
            found[count] = timed
        for count in [] if prober.frames.slow else sorted(found)[:_QUICK_SIZES]:
            again = prober.time(compiled, _large(graph, count))
            if again is not None and again.ns < found[count].ns:
                found[count] = again
    finally:
        compiled.close()
    least_ns = min((timed.ns for timed in found.values()), default=0.0)  # a larger one never takes less
    for count, timed in found.items() if probe else ():
        base_ns = least_ns + max(made[count] - made[_SMALL], 0.0)
        if count > _SMALL and math.isfinite(base_ns):
            prober.add(probe, (count * 4,), timed, base_ns=base_ns)
    return {count: timed.ns for count, timed in found.items()}


def _large(graph: Graph, count: int) -> dict[str, Any]:
    """Return the inputs of a graph that moves so many elements."""
    if len(graph.inputs) == 1:
        return {"data": np.ones(count, np.float32)}
    return {"seed": np.ones(1, np.float32), "shape": np.array([count], np.int64)}


def _tiny_chain(links: int) -> Graph:
    graph = Graph("tiny")
    value = graph.input("x", [4])
    for _ in range(links):
        (value,) = graph.onnx_node("Sin", [value], types=[TensorType(DType.F32, Shape([4]))])
    graph.outputs = [value]
    return graph
