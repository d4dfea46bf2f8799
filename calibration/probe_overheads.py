"""What a run costs before it computes: the round trip, launches, inputs, outputs, transfers, and opening a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx_ort.calibration import graphs
from rlx_ort.calibration.prober import FAILURES, Prober
from rlx_ort.calibration.profile import Sample
from rlx_ort.calibration.timing import Timed
from rlx_ort.errors import RunError
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.types import TensorType

__all__ = ["again", "anchor", "overheads", "transfers"]

_EXTRA = 7  # more inputs, or outputs, than the smallest graph has


def anchor(prober: Prober) -> CompiledGraph:
    """Return the smallest graph, compiled, to be kept open while the device is measured.

    Some providers give up the device when their last session closes, and the next one has to find it and build its
    kernels again (WebGPU: 63 ms against 2 ms for a session, measured on an H200).
    """
    compiled = prober.compile(_tiny_chain(1))
    compiled.run({"x": np.ones(4, np.float32)})
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
        feeds = {"x": np.ones(4, np.float32)}
        single, chain = (_alone(prober, _tiny_chain(count), feeds) for count in (1, links + 1))
        if single is None or chain is None:
            raise RunError(f"the clock stands still on {prober.device.display}: nothing can be measured")
        prober.add("roundtrip", (), single)
        prober.add("dispatch", (), chain, base_ns=single.ns, share=links)
        dispatch_ns = max((chain.ns - single.ns) / links, 0.0)
        prober.launches(single.ns, dispatch_ns)
        for probe, graph in (
            ("tensor_in", graphs.transfers(1 + _EXTRA, 1)),
            ("tensor_out", graphs.transfers(1, 1 + _EXTRA)),
        ):
            small = {value.name: np.ones(4, np.float32) for value in graph.inputs}
            found = _alone(prober, graph, small)
            prober.add(probe, (), found, base_ns=single.ns + _EXTRA * dispatch_ns, share=_EXTRA)
        return prober.rows
    finally:
        prober.rows = kept


def _alone(prober: Prober, graph: Graph, feeds: dict[str, Any]) -> Timed | None:
    """Return the time of a graph in a session of its own."""
    compiled = prober.compile(graph)
    try:
        return prober.time(compiled, feeds, fresh=True, thorough=not prober.hurried)
    finally:
        compiled.close()


def transfers(prober: Prober, deadline_ns: float) -> None:
    """Measure what a large input or output takes beyond a small one, each size in one session."""
    counts = (1 << 8, 1 << 18) if prober.quick else (1 << 8, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
    begun = prober.budget.elapsed_ns
    for probe in ("upload", "readback"):
        try:
            compiled = prober.compile(graphs.transfer(upload=probe == "upload"))
        except FAILURES as err:
            prober.skipped[probe] = str(err).splitlines()[0]
            continue
        try:
            _transfer_sizes(prober, compiled, probe, counts, deadline_ns)
        finally:
            compiled.close()
    prober.account("transfers", begun)


def _transfer_sizes(
    prober: Prober, compiled: CompiledGraph, probe: str, counts: Sequence[int], deadline_ns: float
) -> None:
    small = prober.time(compiled, _large(probe, 4), fresh=True)
    last_ns, last_count = 0.0, counts[0]
    for count in counts if small is not None else ():
        expected = last_ns * count / last_count
        if expected > 8 * prober.budget.point_ns or not prober.budget.fits(deadline_ns, 3 * expected):
            prober.skipped[probe] = f"no time for {count * 4} bytes"
            break
        base_ns = 0.0 if small is None else small.ns
        if probe == "readback":  # the device also has to make the tensor
            base_ns += max(prober.frames.of((count,)) - prober.frames.of((4,)), 0.0)
        found = prober.time(compiled, _large(probe, count), least=5)
        last_ns, last_count = 0.0 if found is None else found.ns, count
        prober.add(probe, (count * 4,), found, base_ns=base_ns)


def _large(probe: str, count: int) -> dict[str, Any]:
    """Return the inputs of a graph that moves so many elements."""
    if probe == "upload":
        return {"data": np.ones(count, np.float32)}
    return {"seed": np.ones(1, np.float32), "shape": np.array([count], np.int64)}


def _tiny_chain(links: int) -> Graph:
    graph = Graph("tiny")
    value = graph.input("x", [4])
    for _ in range(links):
        (value,) = graph.onnx_node("Sin", [value], types=[TensorType(DType.F32, Shape([4]))])
    graph.outputs = [value]
    return graph
