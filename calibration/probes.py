"""The measurements and their order: first what every prediction needs, then finer grids, as long as there is time.

What `size` counts in a row, by probe:
    roundtrip ()               one tiny node from numpy to numpy
    dispatch ()                one more tiny node in a chain
    tensor_in (), tensor_out ()  one more small input, one more small output
    upload (bytes), readback (bytes)  a tensor to the device, to the host, beyond a small one
    gemm (m, k, n)             a matrix product with a weight that stays in the caches
    alone (m, k, n)            what a run of one product takes beyond the round trip
    after (m, k, n)            what a product adds to a run of the copies that make its rows
    weights (bytes)            (1, 1024) by (1024, 1024) with so many bytes of weights in turn
    bmm (batch, s, d)          a product of two computed values, the mean of (s, d) by (d, s) and (s, s) by (s, d)
    turned (batch, s, d)       a transpose before such a product; next to nothing where it is fused
    conv3x3, conv1x1, depthwise (pixels, channels)  pixels of all pictures together
    attention (batch * heads, sequence, head_dim)   fused attention
    lstm (steps, batch, hidden)  one LSTM layer
    op:NAME (elements)         one node of an operator over rows of 256; op:TransposeRows keeps the last axis,
                               op:Lookup is a Gather out of a tensor that no node has just written, op:MaxOfGiven and
                               op:SumOfGiven reduce all rows of one to one
                               op:MaxColumns and op:SumColumns reduce all rows, of 250, to one
    rows:NAME (elements, row)  the same over rows of another length, or copies of pieces half as long
    fused:NAME (elements)      what a node adds to the product or convolution before it; next to nothing where fused
    session (), session_node () opening a session, and each node of it
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from rlx_ort.calibration import first_products, probe_given, second_visits
from rlx_ort.calibration import probe_layers as layers
from rlx_ort.calibration import probe_operators as operators
from rlx_ort.calibration import probe_overheads as first
from rlx_ort.calibration import probe_products as products
from rlx_ort.calibration.host_speed import launched_undisturbed
from rlx_ort.calibration.prober import Prober
from rlx_ort.calibration.references import REFERENCES
from rlx_ort.calibration.series import Series
from rlx_ort.device import Device

__all__ = ["measure"]

_FAIR = 2  # times its share of the time that is left is what a series may take
_PATIENCE = 0.1  # of the budget that a series every prediction needs may take beyond that: kernels load at first use
_CORE_SHARE = 0.8  # of the time for probes, when what every prediction needs should be through
_SLOW_DISPATCH_NS = 20_000.0  # a device in software gets fewer sizes of everything
_CORE_ONCE_MORE = 0.06  # of the budget is for disturbed rows that every prediction needs, before the finer grids
_REFERENCE_POINTS, _REFERENCE_SESSIONS = 1.5, 1.5  # what a graph takes: points' time, sessions like the first
_Plan = Sequence[tuple[str, Sequence[Series]]]


class _Shares(NamedTuple):
    """Shares of the budget: gone when the finer grids are through, at least and at most, and for second visits."""

    least: float
    most: float
    once_more: float


_SHARES, _CPU_SHARES = _Shares(0.7, 0.8, 0.12), _Shares(0.68, 0.72, 0.2)


def measure(prober: Prober) -> None:
    """Measure everything the budget allows, in order of importance.

    Raises:
        DeviceError: the device does not work.
        RunError: even the smallest graph fails on it.
    """
    prober.step("round trip")
    # An idle session's threads would take the cores of a CPU, and it has no state worth keeping.
    kept = None if prober.device.kind == Device.CPU.kind else first.anchor(prober)
    try:
        first.overheads(prober)
        limit_ns = prober.budget.limit_ns
        slow = prober.dispatch_ns > _SLOW_DISPATCH_NS
        plan = _quick(prober.device, far=prober.frames.slow) if prober.quick else _core(prober.device, slow=slow)
        deadline_ns = limit_ns if prober.quick else _finer_ns(prober)
        _follow(prober, plan, _CORE_SHARE * deadline_ns, deadline_ns, 0.0 if prober.quick else _PATIENCE * limit_ns)
        prober.hurried = False
        if not prober.quick:
            # What every prediction needs comes before what makes some better.
            core_ns = prober.budget.elapsed_ns + _CORE_ONCE_MORE * limit_ns
            second_visits.visit_disturbed(prober, _series(plan), min(core_ns, deadline_ns))
            finer = _finer(prober.device)
            _follow(prober, finer, deadline_ns, deadline_ns)
            plan = (*plan, *finer)
        prober.step("once more")
        first.again(prober)
        if not prober.quick:
            second_visits.visit(prober, _series(plan), deadline_ns + _shares(prober.device).once_more * limit_ns)
        if prober.launched:
            prober.rows = launched_undisturbed(prober.rows, prober.slower)
        products.subtract(prober)
    finally:
        if kept is not None:
            kept.close()


def _follow(prober: Prober, plan: _Plan, target_ns: float, deadline_ns: float, patience_ns: float = 0.0) -> None:
    """Measure a plan's series in order; they hurry where the plan would not be through at the target."""
    limit_ns = prober.budget.limit_ns
    count = sum(len(series) for _, series in plan)
    begun, taken = prober.budget.elapsed_ns, [0.0]
    for title, group in plan:
        prober.step(title)
        if title == "transfers":
            first.transfers(prober, limit_ns)
        elif title == "first products":
            first_products.measure(prober, limit_ns)
        elif title == "given tensors":
            probe_given.measure(prober, deadline_ns)
        for series in group:
            now, done = prober.budget.elapsed_ns, len(taken) - 1
            prober.hurried = now - begun > (target_ns - begun) * (done + 1) / count
            # Nothing takes so much that what comes after it gets nothing, nor gets less than opening a session takes.
            fair = max(_FAIR * max(deadline_ns - now, 0.0) / (count - done), statistics.median(taken))
            prober.run(series, min(now + fair, deadline_ns), patience_ns)
            taken.append(prober.budget.elapsed_ns - now)


def _series(plan: _Plan) -> list[Series]:
    return [series for _, group in plan for series in group]


def _finer_ns(prober: Prober) -> float:
    """Return when the last series should be through, so that there is time to measure again, and for whole graphs."""
    limit_ns = prober.budget.limit_ns
    graph_ns = _REFERENCE_POINTS * prober.budget.point_ns + _REFERENCE_SESSIONS * prober.of("session")
    shares = _shares(prober.device)
    left_ns = (1.0 - shares.once_more) * limit_ns - len(REFERENCES) * graph_ns
    return min(max(left_ns, shares.least * limit_ns), shares.most * limit_ns)


def _shares(device: Device) -> _Shares:
    """Return how the time is shared out; a CPU measures its products in two sessions."""
    return _CPU_SHARES if device.kind == Device.CPU.kind else _SHARES


_ROWS = (1, 8, 32, 128, 512, 4096)
_FEW_ROWS = 4  # as quick as one row on a CPU, which waits for the weight: with 8 rows it took 1.5 to 3 times as long
_COUNTS = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
_CPU_COUNTS = (1 << 10, 1 << 14, 1 << 18, 1 << 20)  # one thread makes the tensors, so larger ones drown in their making
_BETWEEN = (1 << 16, 1 << 20, 1 << 21, 1 << 22)  # more sizes of the addition, to see where tensors outgrow the caches
_MIDDLE_SIDES = (1448, 2560)
"""Sides at which weights outgrow caches: a row took 16 cores 27 us by the first of them, 31 us by 2048 x 2048, 118 us
by the second and 310 us by 4096 x 4096."""
_MIXING = ("conv3x3", "conv1x1")  # convolutions whose time does not go by the elements alone
_PICTURES = ((1, 7), (1, 28), (4, 56), (32, 56))


def _core(device: Device, *, slow: bool) -> _Plan:
    """Return what every prediction needs, two or more sizes of each, most important first."""
    on_cpu = device.kind == Device.CPU.kind
    rows, counts = _ROWS[::2] if slow else _ROWS, _counts(device, slow=slow)
    few = (_FEW_ROWS,) if on_cpu else ()
    squares = functools.partial(products.squares, few=on_cpu)
    conv = functools.partial(layers.conv, on_cpu=on_cpu)
    largest = [dataclasses.replace(squares(4096, rows[:5:2]), once=on_cpu)]
    pictures = _PICTURES[:2] if slow else _PICTURES
    return (
        ("matrix products", [squares(side, (*rows, *few)) for side in (256, 1024)]),
        ("operators", [operators.operator("Add", counts if slow else tuple(sorted({*counts, *_BETWEEN})))]),
        ("transfers", []),
        ("matrix products", [squares(side, (*rows[:5], *few)) for side in (64, 512)]),
        ("operators", [operators.operator(name, counts, added=on_cpu) for name in operators.CORE_OPERATORS[1:]]),
        ("convolutions", [conv(probe, 64, pictures) for probe in _MIXING]),
        # To search for the best algorithm of four depthwise ones of the largest pictures took CUDA 1.1 s.
        ("convolutions", [conv("depthwise", 64, pictures if on_cpu else pictures[:3])]),
        ("operators", [] if on_cpu else [operators.operator("Add", (1 << 25,))]),
        ("given tensors", []),
        ("fusions with products", products.product_fusions((8, 1024) if slow else (8, 128, 1024, 8192))),
        ("fusions with convolutions", products.conv_fusions(((1, 7), (4, 56)))),
        ("batched products", [layers.batched(((8, 16, 64), (8, 128, 64), (96, 128, 64), (96, 512, 64)))]),
        ("batched products", [layers.turned(((8, 16, 64), (8, 128, 64), (96, 128, 64)))]),
        ("attention", [layers.attention(((1, 16), (1, 128), (8, 128), (8, 512)))]),
        ("recurrent layers", [layers.recurrent(hidden, ((16, 1), (64, 1), (16, 16))) for hidden in (256, 64)]),
        (
            "matrix products",
            [
                squares(2048, (*rows, *few)),
                *(squares(side, (1, *few, 8)) for side in (_MIDDLE_SIDES if on_cpu else ())),
            ],
        ),
        ("first products", []),
        ("cold weights", [products.cold_weights(count) for count in (1, 10)] if on_cpu else []),
        ("matrix products", [products.skewed(16, 256, (1, 32, 512))]),
        ("matrix products", [] if on_cpu else largest),
        ("row lengths", [operators.by_row(name, 1024, counts[1:3]) for name in operators.BY_ROW[:2]]),
        ("convolutions", [] if slow else [conv(probe, 16, pictures if on_cpu else pictures[1:3]) for probe in _MIXING]),
        ("convolutions", [conv(probe, 256, pictures[:3]) for probe in _MIXING]),
        ("operators", _columns(device) if on_cpu else []),
        ("operators", [operators.operator(name, counts[2:3]) for name in operators.MORE_OPERATORS] if on_cpu else []),
        ("matrix products", largest if on_cpu else []),  # opening it takes a CPU as long as ten others
    )


def _counts(device: Device, *, slow: bool = False) -> tuple[int, ...]:
    """Return the numbers of elements that operators are measured at."""
    return _COUNTS[:3] if slow else _CPU_COUNTS if device.kind == Device.CPU.kind else _COUNTS


def _columns(device: Device) -> list[Series]:
    """Return what is reduced over rows, of about the usual length and of a larger one."""
    usual = [operators.operator(name, _counts(device)[1:]) for name in operators.COLUMNS]
    return [*usual, *(operators.by_row(name, operators.COLUMNS_WIDE, _COUNTS[2:]) for name in operators.COLUMNS)]


def _finer(device: Device) -> _Plan:
    """Return what makes predictions better where there is time for it."""
    on_cpu = device.kind == Device.CPU.kind
    cold = [products.cold_weights(count) for count in (4, 32)]
    squares = functools.partial(products.squares, few=on_cpu)
    other = [
        series for side in (256, 1024) for series in products.other_types(side, (1, 64, 512, 4096), tf32=not on_cpu)
    ]
    return (
        ("operators", [] if on_cpu else [operators.operator(name, _COUNTS[::2]) for name in operators.MORE_OPERATORS]),
        ("operators", [] if on_cpu else _columns(device)),
        ("cold weights", cold if on_cpu else []),
        ("matrix products", [squares(16, _ROWS), squares(128, _ROWS)]),
        ("matrix products", [products.skewed(*sides, (1, 32, 512)) for sides in ((64, 1024), (256, 4096))]),
        ("matrix products", [squares(4096, (8, 128, 4096))]),
        ("row lengths", [operators.by_row("Concat", 1 << 14, (1 << 18, 1 << 20))]),
        ("row lengths", [operators.by_row(name, 64, _COUNTS[1:3], added=on_cpu) for name in operators.BY_ROW]),
        ("row lengths", [operators.by_row(name, 1024, _COUNTS[1:3], added=on_cpu) for name in operators.BY_ROW[2:]]),
        ("other types", other),
        ("operators", [] if on_cpu else [operators.operator(name, (1 << 25,)) for name in ("Softmax", "Transpose")]),
        ("recurrent layers", [layers.recurrent(512, ((16, 1), (64, 1), (16, 16), (64, 16)))]),
        ("other types", products.other_types(4096, (1, 64, 512, 4096), tf32=not on_cpu)),
    )


def _quick(device: Device, *, far: bool) -> _Plan:
    """Return the short form: two sizes of what matters most.

    A device that is far from the host gets no fused attention, which then costs what its products and softmax do: the
    first use on a machine builds its kernel, 1.05 s for WebGPU on an H200, and that is half of the time there is.
    """
    counts = (1 << 10, 1 << 18)
    conv = functools.partial(layers.conv, on_cpu=device.kind == Device.CPU.kind)
    return (
        ("matrix products", [products.squares(512, (1, 32, 512))]),
        ("operators", [operators.operator("Add", (*counts, 1 << 22))]),
        ("transfers", []),
        ("matrix products", [products.squares(side, (1, 32, 512)) for side in (64, 2048)]),
        ("operators", [operators.operator(name, counts) for name in operators.CORE_OPERATORS[1:6]]),
        ("convolutions", [conv(probe, 64, ((1, 7), (1, 28), (4, 28))) for probe in layers.CONVS]),
        ("batched products", [layers.batched(((8, 64, 64),))]),
        ("attention", [] if far else [layers.attention(((1, 64),))]),
        ("first products", []),
    )
