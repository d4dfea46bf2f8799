"""The measurements, most important first, so that a calibration that runs out of time still says something.

What `size` counts in a row, by probe:
    roundtrip ()               one tiny node from numpy to numpy
    dispatch ()                one more tiny node in a chain
    tensor_in (), tensor_out ()  one more small input, one more small output
    upload (bytes), readback (bytes)  a tensor to the device, to the host, beyond the round trip
    gemm (m, k, n)             a matrix product with a weight
    bmm (batch, s, d)          a product of two computed values, the mean of (s, d) by (d, s) and (s, s) by (s, d)
    conv3x3, conv1x1, depthwise (pixels, channels)  pixels of all pictures together
    attention (batch * heads, sequence, head_dim)   fused attention
    lstm (steps, batch, hidden)  one LSTM layer
    op:NAME (elements)         one node of an operator
    fused:NAME (elements)      what a node adds to the product or convolution before it; next to nothing where fused
    session (), session_node () opening a session, and each node of it
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from rlx_ort.calibration import graphs
from rlx_ort.calibration.profile import Sample
from rlx_ort.calibration.timing import Budget, Timed, timed
from rlx_ort.device import Device
from rlx_ort.errors import DeviceError, GraphError, RunError
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.execution.options import CompileOptions, OptimizationLevel, PlacementRule, Precision
from rlx_ort.execution.session import Session
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph

__all__ = ["OPERATORS", "Prober", "Progress"]

Progress = Callable[[str, float], None]
"""Called with what is being measured and the share of the time budget that is gone, 0 to 1."""

OPERATORS = (
    "Add",
    "Relu",
    "Tanh",
    "Softmax",
    "LayerNormalization",
    "Gather",
    "Transpose",
    "ReduceMean",
    "Concat",
    "Erf",
    "Exp",
    "AddRow",
    "Sigmoid",
    "Mul",
    "Sin",
    "Pow",
    "Where",
    "Cast",
    "Gelu",
    "Div",
    "Sqrt",
    "Reshape",
)
"""The operators that have a row of their own; others are priced like one of these."""

T = TypeVar("T")
_Builder = Callable[[int], Graph]  # the number of links -> the graph
_Sizes = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]  # shape of the large tensor, size in the row
_PRODUCT_FUSIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ()),
    ("bias", ("bias",)),
    ("gemm_act", ("bias", "act")),
)
_CONV_FUSIONS: tuple[tuple[str, tuple[str, ...]], ...] = (("conv", ()), ("conv_act", ("act",)), ("conv_add", ("add",)))

_log = logging.getLogger(__name__)
_FAILURES = (DeviceError, GraphError, RunError)
_WIDTH = 256
_COMPANIONS = {"ReduceMean": "op:Add"}  # measured with it in a link, and subtracted
_LONGEST_STRETCH = 8
_SLOW_DISPATCH_NS = 20_000.0  # a device in software: its nodes stand out of any round trip
_NEEDED = ("gemm", "op:Add")
_NODES_A_LINK = {"Where": 2, "Cast": 2, "Concat": 3}  # nodes of about one cost each, which share the time


class Prober:
    """Measures one device and collects the rows.

    Args:
        device: the device.
        budget: the time it may take.
        quick: measure fewer points.
        progress: told what is going on.

    Attributes:
        rows: what was measured so far.
        skipped: probe -> why it has no row, or not all of them.
    """

    def __init__(
        self, device: Device, budget: Budget, *, quick: bool = False, progress: Progress | None = None
    ) -> None:
        self.device = device
        self.budget = budget
        self.quick = quick
        self.rows: list[Sample] = []
        self.skipped: dict[str, str] = {}
        self._progress = progress
        self._frame_ns: dict[tuple[int, int], float] = {}
        self._point_limit_ns = 4 * budget.point_ns
        self._until_ns = budget.limit_ns
        self._deadline_ns = budget.limit_ns
        self._dispatch_ns = 0.0
        self._stretch = 1
        self._long_ns = budget.point_ns / 3

    def measure(self) -> None:
        """Measure everything the budget allows, in order of importance.

        Raises:
            DeviceError: the device does not work.
            RunError: even the smallest graph fails on it.
        """
        self._step("round trip", 0.0)
        self._overheads()
        plan: list[tuple[str, float, Callable[[], None]]] = [
            ("matrix products", 0.25, self._gemms),
            ("transfers", 0.32, self._transfers),
            ("fusions with products", 0.37, self._product_fusions),
            ("operators", 0.60, self._operators),
            ("fusions with convolutions", 0.63, self._conv_fusions),
            ("convolutions", 0.82, self._convs),
            ("batched products", 0.85, self._bmms),
            ("attention", 0.89, self._attentions),
            ("recurrent layers", 0.93, self._lstms),
            ("matrix products in tf32 and f16", 1.0, self._other_dtypes),
        ]
        begun = self.budget.elapsed_ns
        for title, share, probe in plan:
            self._step(title, self.budget.elapsed_ns / self.budget.limit_ns)
            self._until_ns = begun + share * max(self.budget.limit_ns - begun, 0.0)
            try:
                probe()
            except _FAILURES as err:
                self.skipped[title] = str(err).splitlines()[0]
        self._step("done", 1.0)

    # --- the probes

    def _overheads(self) -> None:
        """Measure the round trip, the launch slope, small inputs and outputs, and opening sessions."""
        links = 32 if self.quick else 64
        clock = self.budget.clock
        feeds = {"x": np.ones(4, np.float32)}
        one = self._compile(_tiny_chain(1))
        single = self._time(one, feeds, most=60, warm=3)
        one.close()
        start = clock()
        again = self._compile(_tiny_chain(1))
        session_ns = max(clock() - start, 1)
        again.close()
        start = clock()
        many = self._compile(_tiny_chain(links + 1))
        long_session_ns = clock() - start
        chain = self._time(many, feeds, most=60, warm=3)
        many.close()
        if single is None or chain is None:
            raise RunError(f"the clock stands still on {self.device.display}: nothing can be measured")
        self._add("roundtrip", (), single)
        self._add("dispatch", (), chain, base_ns=single.ns, share=links)
        self.rows.append(Sample("session", (), float(session_ns)))
        self.rows.append(Sample("session_node", (), max(long_session_ns - session_ns, 0) / links))
        self._dispatch_ns = max((chain.ns - single.ns) / links, 0.0)
        if self._dispatch_ns < _SLOW_DISPATCH_NS:
            self._stretch = min(max(round(single.ns / (8 * self._dispatch_ns + 1)), 1), _LONGEST_STRETCH)
        extra = 7
        for probe, graph, nodes in (
            ("tensor_in", graphs.transfers(1 + extra, 1), extra),
            ("tensor_out", graphs.transfers(1, 1 + extra), extra),
        ):
            compiled = self._compile(graph)
            small = {f"x{index}": np.ones(4, np.float32) for index in range(len(graph.inputs))}
            found = self._time(compiled, small, most=40, warm=2)
            self._add(probe, (), found, base_ns=single.ns + nodes * self._dispatch_ns, share=extra)
            compiled.close()

    def _gemms(self) -> None:
        sides = (64, 512, 4096) if self.quick else (16, 64, 256, 1024, 4096)
        rows = (1, 32, 512) if self.quick else (1, 8, 64, 512, 4096)
        pairs = [(k, n) for k in sides for n in sides if k <= n]
        # Squares first: they tell most when the time runs out.
        for k, n in self._fair(sorted(pairs, key=lambda pair: (pair[0] != pair[1], pair[0] * pair[1]))):
            self._gemm(k, n, rows, DType.F32, "f32", CompileOptions())

    def _other_dtypes(self) -> None:
        sides = (512,) if self.quick else (256, 1024, 4096)
        rows = (1, 512) if self.quick else (1, 64, 512, 4096)
        tf32 = CompileOptions(precision=Precision.TF32)
        for side in self._fair(sides):
            if self.device.kind != Device.CPU.kind:
                self._gemm(side, side, rows, DType.F32, "tf32", tf32)
            self._gemm(side, side, rows, DType.F16, "f16", CompileOptions())

    def _gemm(self, k: int, n: int, rows: tuple[int, ...], dtype: DType, label: str, options: CompileOptions) -> None:
        links = 16 if k * n <= 256 * 1024 else 8 if k * n <= 1024**2 else 4
        sizes = [((m, k), (m, k, n)) for m in rows]
        work = [2.0 * m * k * n for m in rows]
        self._chain("gemm", lambda count: graphs.gemm(k, n, count, dtype), sizes, work, links, dtype, label, options)

    def _product_fusions(self) -> None:
        sizes = [((m, 64), (m * 64,)) for m in ((8, 1024) if self.quick else (8, 1024, 16384))]
        work = [float(size[1][0]) for size in sizes]
        for probe, extra in self._fair(_PRODUCT_FUSIONS):
            self._chain(f"fused:{probe}", _fused_gemm_builder(extra), sizes, work, 16)
        self._subtract({"bias": "", "gemm_act": "bias"})

    def _conv_fusions(self) -> None:
        pictures = ((1, 7),) if self.quick else ((1, 7), (4, 56))
        sizes = [((b, 64, side, side), (b * side * side * 64,)) for b, side in pictures]
        work = [float(size[1][0]) for size in sizes]
        for probe, extra in self._fair(_CONV_FUSIONS):
            self._chain(f"fused:{probe}", _fused_conv_builder(extra), sizes, work, 6)
        self._subtract({"conv_act": "conv", "conv_add": "conv"})

    def _subtract(self, before: Mapping[str, str]) -> None:
        """Turn the times of whole links into what each fused node adds to the link without it."""
        names = {*before, *before.values()}
        whole = {
            (row.probe[6:], row.size): row for row in self.rows if row.probe[:6] == "fused:" and row.probe[6:] in names
        }
        self.rows = [row for row in self.rows if row not in whole.values()]
        for (probe, size), row in whole.items():
            bare = whole.get((before.get(probe, "-"), size))
            if bare is not None:
                extra = max(row.ns - bare.ns, 0.0)
                spread = max(row.spread, bare.spread) * row.ns / max(extra, row.ns * 0.01)
                self.rows.append(Sample(f"fused:{probe}", size, extra, row.dtype, round(spread, 4), row.repeats))

    def _bmms(self) -> None:
        shapes = ((8, 64, 64),) if self.quick else ((8, 16, 64), (8, 128, 64), (96, 128, 64), (96, 512, 64))
        links = 4
        self._deadline_ns = self._until_ns
        sizes = [(shape, shape) for shape in shapes]
        work = [2.0 * math.prod(shape) * shape[1] for shape in shapes]
        self._chain("bmm", lambda count: graphs.bmm(count), sizes, work, links, extra=_bmm_feeds)

    def _convs(self) -> None:
        channels = (64,) if self.quick else (64, 256, 16)
        pictures = ((1, 28), (4, 28)) if self.quick else ((1, 7), (1, 28), (4, 56), (32, 56))
        kinds = (("conv3x3", 3, False), ("conv1x1", 1, False), ("depthwise", 3, True))
        links = 4
        for count, (probe, kernel, depthwise) in self._fair([(count, kind) for count in channels for kind in kinds]):
            sizes = [((b, count, side, side), (b * side * side, count)) for b, side in pictures]
            each = 2.0 * kernel * kernel * count * (1 if depthwise else count)
            work = [each * size[1][0] for size in sizes]
            self._chain(probe, _conv_builder(count, kernel, depthwise), sizes, work, links)

    def _attentions(self) -> None:
        self._deadline_ns = self._until_ns
        heads, depth = 12, 64
        shapes = ((1, 64),) if self.quick else ((1, 16), (1, 128), (8, 128), (8, 512))
        sizes = [((b, s, heads * depth), (b * heads, s, depth)) for b, s in shapes]
        work = [4.0 * b * heads * s * s * depth for b, s in shapes]
        self._chain("attention", lambda count: graphs.attention(heads, depth, count), sizes, work, 4)

    def _lstms(self) -> None:
        if self.quick:
            return
        for hidden in self._fair((64, 512)):
            sizes = [((t, b, hidden), (t, b, hidden)) for t, b in ((16, 1), (64, 1), (16, 16), (64, 16))]
            work = [16.0 * t * b * hidden * hidden for t, b in ((16, 1), (64, 1), (16, 16), (64, 16))]
            self._chain("lstm", _lstm_builder(hidden), sizes, work, 2, companion="dispatch")

    def _operators(self) -> None:
        counts = (1 << 10, 1 << 18) if self.quick else (1 << 10, 1 << 14, 1 << 18, 1 << 22)
        names = OPERATORS[:6] if self.quick else OPERATORS
        plain = CompileOptions(optimization=OptimizationLevel.OFF)  # what is measured must not be optimised away
        for name in self._fair(names):
            most = (1 << 25,) if name in ("Add", "Softmax", "Transpose") and not self.quick else ()
            sizes = [((count // _WIDTH, _WIDTH), (count,)) for count in (*counts, *most)]
            links = 4 if name in _NODES_A_LINK else 8
            self._chain(
                f"op:{name}",
                _operator_builder(name),
                sizes,
                [float(size[1][0]) for size in sizes],
                links,
                nodes=_NODES_A_LINK.get(name, 1),
                companion=_COMPANIONS.get(name, ""),
                options=plain,
                extra=_gather_feeds if name == "Gather" else None,
            )

    def _transfers(self) -> None:
        counts = (1 << 8, 1 << 18) if self.quick else (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 24)
        roundtrip = self._of("roundtrip")
        self._frames([(count,) for count in counts[:-1]])
        for probe in ("upload", "readback"):
            compiled = self._compile(graphs.transfer(upload=probe == "upload"))
            last_ns = 0.0
            for count in counts:
                if last_ns * 16 > 8 * self._point_limit_ns or not self.budget.fits(self._until_ns, last_ns * 16):
                    self.skipped[probe] = f"no time for {count * 4} bytes"
                    break
                feeds: dict[str, Any] = {"data": np.ones(count, np.float32)}
                if probe == "readback":
                    feeds = {"seed": np.ones(1, np.float32), "shape": np.array([count], np.int64)}
                found = self._time(compiled, feeds, least=7)
                last_ns = 0.0 if found is None else found.ns
                frame_ns = self._frame_ns.get((1, count), roundtrip) - self._dispatch_ns
                self._add(probe, (count * 4,), found, base_ns=roundtrip if probe == "upload" else frame_ns)
            compiled.close()

    # --- how each is measured

    def _chain(
        self,
        probe: str,
        build: _Builder,
        sizes: _Sizes,
        work: Sequence[float],
        links: int,
        dtype: DType = DType.F32,
        label: str = "f32",
        options: CompileOptions | None = None,
        *,
        nodes: int = 1,
        companion: str = "",
        extra: Callable[[tuple[int, ...]], Mapping[str, Any]] | None = None,
    ) -> None:
        """Time a chain at each (shape, row size), smallest work first, and stop where a run would take too long.

        Short work is measured in long chains where a round trip is long, so that it stands out of the round trip's
        noise. Only one session is open at a time: idle threads of another would take the cores.
        """
        needed = probe in _NEEDED and label == "f32" and not any(row.probe == probe for row in self.rows)
        if not needed and not self.budget.fits(self._deadline_ns):
            self.skipped[probe] = "the time was up"
            return
        count = links * self._stretch
        compiled: CompiledGraph | None = None
        link_ns, last_work = 0.0, 0.0
        try:
            self._frames([shape for shape, _ in sizes])
            for amount, (shape, size) in sorted(zip(work, sizes, strict=True), key=lambda item: item[0]):
                expected = link_ns * amount / last_work if last_work else 0.0
                if count > links and expected * count > self._long_ns and compiled is not None:
                    compiled.close()
                    compiled, count = None, links
                base = self._frame_ns.get((len(shape), math.prod(shape)))
                late = expected * count > self._point_limit_ns
                late = late or base is None or not self.budget.fits(self._deadline_ns, expected * count)
                # Without a single row of what is needed nothing can be predicted, whatever it takes.
                if late and not (needed and not last_work):
                    self.skipped[probe] = f"no time for {label} of size {size} and above"
                    break
                if compiled is None:
                    compiled = self._compile(build(count), options)
                feeds = {"seed": np.full(1, 0.5, dtype.numpy), "shape": np.array(shape, np.int64)}
                if extra is not None:
                    feeds |= extra(shape)
                found = self._time(compiled, feeds)
                minus = self._of(companion, size)
                self._add(probe, size, found, label, base_ns=base or 0.0, share=count * nodes, minus_ns=minus)
                if found is not None:
                    link_ns, last_work = max(found.ns - (base or 0.0), 0.0) / count, amount
        except _FAILURES as err:
            self.skipped[probe] = f"{label}: {str(err).splitlines()[0]}"
        finally:
            if compiled is not None:
                compiled.close()

    def _frames(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Time graphs that make the large tensors and do nothing with them, where that was not done yet."""
        keys = {(len(shape), math.prod(shape)): shape for shape in sorted(shapes, key=math.prod)}
        missing = {key: shape for key, shape in keys.items() if key not in self._frame_ns}
        if not missing:
            return
        compiled = self._compile(graphs.frame(len(next(iter(missing.values())))))
        last_ns, last_count = 0.0, 1
        for key, shape in missing.items():
            if last_ns * key[1] / last_count > self._point_limit_ns:
                break  # a chain of such tensors would take too long as well
            feeds = {"seed": np.full(1, 0.5, np.float32), "shape": np.array(shape, np.int64)}
            found = self._time(compiled, feeds)
            last_ns, last_count = 0.0 if found is None else found.ns, key[1]
            self._frame_ns[key] = last_ns
        compiled.close()

    def _compile(self, graph: Graph, options: CompileOptions | None = None) -> CompiledGraph:
        options = (options or CompileOptions()).with_(placement=PlacementRule.STRICT)
        return Session(self.device, options).compile(graph)

    def _time(
        self, compiled: CompiledGraph, feeds: Mapping[str, Any], most: int = 15, warm: int = 2, least: int = 3
    ) -> Timed | None:
        return timed(lambda: compiled.run(feeds), self.budget, most, warm, least)

    def _add(
        self,
        probe: str,
        size: tuple[int, ...],
        found: Timed | None,
        dtype: str = "f32",
        *,
        base_ns: float = 0.0,
        share: int = 1,
        minus_ns: float = 0.0,
    ) -> None:
        """Keep a row: what is left above the base, divided among the links, less what else a link does."""
        if found is None:
            self.skipped[probe] = "the clock stood still"
            return
        ns = max((found.ns - base_ns) / share - minus_ns, 0.0)
        # The spread of the whole run, carried over to the part that is left.
        spread = found.spread * found.ns / max(found.ns - base_ns, found.ns * 0.01)
        self.rows.append(Sample(probe, size, ns, dtype, round(spread, 4), found.repeats))

    def _of(self, probe: str, size: tuple[int, ...] = ()) -> float:
        """Return what a probe measured at a size, or at any; 0 when it has no such row."""
        rows = [row for row in self.rows if row.probe == probe and row.size in (size, ())]
        return rows[0].ns if rows else 0.0

    def _fair(self, items: Sequence[T]) -> Iterator[T]:
        """Give each item its share of what is left of the section's time; what one leaves goes to the others."""
        for index, item in enumerate(items):
            left = max(self._until_ns - self.budget.elapsed_ns, 0.0)
            self._deadline_ns = self.budget.elapsed_ns + left / (len(items) - index)
            yield item

    def _step(self, what: str, gone: float) -> None:
        _log.debug("calibrating %s: %s", self.device.label, what)
        if self._progress is not None:
            self._progress(what, min(gone, 1.0))


def _tiny_chain(links: int) -> Graph:
    from rlx_ort.ir.shape import Shape
    from rlx_ort.ir.types import TensorType

    graph = Graph("tiny")
    value = graph.input("x", [4])
    for _ in range(links):
        (value,) = graph.onnx_node("Sin", [value], types=[TensorType(DType.F32, Shape([4]))])
    graph.outputs = [value]
    return graph


def _conv_builder(channels: int, kernel: int, depthwise: bool) -> _Builder:
    return lambda links: graphs.conv(channels, kernel, links, depthwise=depthwise)


def _fused_gemm_builder(extra: tuple[str, ...]) -> _Builder:
    return lambda links: graphs.fused_gemm(64, links, extra)


def _fused_conv_builder(extra: tuple[str, ...]) -> _Builder:
    return lambda links: graphs.conv(64, 3, links, extra=extra)


def _lstm_builder(hidden: int) -> _Builder:
    return lambda links: graphs.lstm(hidden, links)


def _operator_builder(name: str) -> _Builder:
    return lambda links: graphs.elementwise(name, links, _WIDTH)


def _bmm_feeds(shape: tuple[int, ...]) -> dict[str, Any]:
    batch, length, depth = shape
    seed = np.full(1, 1.0 / math.sqrt(depth * length), np.float32)
    return {"key": seed, "key_shape": np.array([batch, depth, length], np.int64)}


def _gather_feeds(shape: tuple[int, ...]) -> dict[str, Any]:
    return {"rows": np.random.default_rng(0).permutation(shape[0]).astype(np.int64)}
