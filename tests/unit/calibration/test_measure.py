"""Rows are the time of one copy, found within a time limit, whatever the device and the clock do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlx_ort import Device, DType, EngineError
from rlx_ort.calibration import measure
from rlx_ort.calibration.kernels import KERNELS, Kernel
from rlx_ort.calibration.measure import Bench, measure_kernels
from rlx_ort.ir.types import Shape, TensorType

TRIP_NS = 3000
KIND = TensorType(DType.F32, Shape([64]))


class Arithmetic:
    """Devices whose runs move a clock: a trip, and a time for each node."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, here: Any) -> None:
        self.now, self.node_ns, self.opened = 0, {"": 100.0}, 0
        self.failing, self.recorded, self.order = "", False, []
        self.refuses_recording = False
        monkeypatch.setattr(Bench, "_compiled", lambda bench, *given: self._compile(bench, *given))

    def bench(self, device: Device = Device.CUDA, limit_s: float = 100.0) -> Bench:
        """Return what measures a device."""
        return Bench(device, limit_s, 0.0001, lambda: self.now)

    def _compile(self, bench: Bench, graph: Any, kernel: Kernel, device_graph: Any) -> Any:
        ops = [getattr(node.op, "op_type", "") for node in graph.graph.nodes]
        self.opened += 1
        self.order.append((bench.device, kernel.name))
        if self.failing and self.failing in ops:
            raise EngineError(f"no kernel of {self.failing}")
        if device_graph is True and self.refuses_recording:
            raise EngineError("cannot be recorded")
        return _Compiled(self, [op for op in ops if op], faster=0.5 if device_graph is True else 1.0)


class _Compiled:
    def __init__(self, device: Arithmetic, ops: list[str], faster: float) -> None:
        self.device, self.ops, self.faster = device, ops, faster
        self.runs = 0

    def run(self, feeds: Any) -> None:
        """Let the time of a run pass; the first two take ten times as long."""
        self.runs += 1
        known = self.device.node_ns
        work = sum(known.get(op, known[""]) for op in self.ops)
        self.device.now += int((TRIP_NS + work) * self.faster * (10 if self.runs < 3 else 1))

    def device_graph_report(self) -> Any:
        """Return whether anything was recorded."""
        return type("Report", (), {"recorded": self.device.recorded})

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, here: Any) -> Arithmetic:
    """A device whose times are arithmetic."""
    return Arithmetic(monkeypatch, here)


def _named(name: str) -> Kernel:
    return next(kernel for kernel in KERNELS if kernel.name == name)


def _row(bench: Bench, name: str, size: tuple[int, ...] = ()) -> Any:
    return bench.rows[name, size, "f32"]


def test_a_row_is_the_time_of_one_copy(machine: Arithmetic) -> None:
    """The round trip and the base are taken out, and the first runs of a session do not count."""
    machine.node_ns |= {"Tanh": 700.0}
    bench = machine.bench()
    bench.visit(_named("run"), ((),))
    bench.visit(_named("Tanh"), ((1 << 10, 256),))
    assert _row(bench, "run").ns == TRIP_NS + 100
    assert _row(bench, "Tanh", (1 << 10,)).ns == pytest.approx(700)


def test_sizes_that_would_take_too_long_are_not_measured(machine: Arithmetic) -> None:
    """The size before takes the whole time of a point, the next one would take 16 times as long."""
    machine.node_ns |= {"Tanh": 100_000.0}
    bench = machine.bench()
    bench.visit(_named("Tanh"), ((1 << 10, 256), (1 << 14, 256)))
    assert [row.size for row in bench.rows.values()] == [(1 << 10,)]
    assert bench.skipped["Tanh"] == "no time for size (16384,)"


def test_a_kernel_that_fails_is_skipped_with_the_message(machine: Arithmetic) -> None:
    """The others have their rows."""
    machine.failing = "Tanh"
    bench = machine.bench()
    measure_kernels([bench])
    assert bench.skipped["Tanh"] == "no kernel of Tanh"
    assert not any(kernel == "Tanh" for kernel, _, _ in bench.rows)
    assert _row(bench, "Exp", (1 << 14,)).ns == pytest.approx(100)


def test_the_limit_is_kept(machine: Arithmetic) -> None:
    """With a tenth of a second no size is begun beyond it, and the most important kernels are there."""
    bench = machine.bench(limit_s=0.1)
    measure_kernels([bench])
    assert bench.spent_ns < 0.101e9
    assert {"run", "launch", "MatMul"} <= {kernel for kernel, _, _ in bench.rows}


def test_the_quicker_visit_counts_and_their_difference_is_the_spread(machine: Arithmetic) -> None:
    """A visit that was disturbed by half makes the row noisy."""
    bench, kernel = machine.bench(), _named("Tanh")
    for ns in (9000.0, 6000.0):
        machine.node_ns["Tanh"] = ns
        bench.visit(kernel, ((1 << 10, 256),))
    row = _row(bench, "Tanh", (1 << 10,))
    assert row.ns == pytest.approx(6000)
    assert row.spread == pytest.approx(1 / 3, abs=0.01)
    assert row.noisy


def test_a_kernel_that_every_model_needs_is_measured_until_it_has_a_time(machine: Arithmetic) -> None:
    """Its first size did not stand out of the noise, and no time is left: it is measured again, and no size more."""
    bench, sizes = machine.bench(limit_s=0.0), ((1 << 10, 256), (1 << 14, 256))
    for ns in (0.0, 700.0):
        machine.node_ns["Add"] = ns
        bench.visit(_named("Add"), sizes[:1])
    bench.visit(_named("Add"), sizes[1:])
    assert {row.size: row.ns for row in bench.rows.values()} == {(1 << 10,): pytest.approx(700)}


@pytest.mark.parametrize(("records", "names"), [(False, {"run"}), (True, {"run", "run:recorded"})])
def test_recorded_runs_are_measured_where_the_device_records(
    records: bool, names: set[str], machine: Arithmetic
) -> None:
    """As a row beside that of the plain run, and as all other kernels."""
    machine.recorded = records
    bench = machine.bench()
    bench.begin(keep_open=False)
    for name in ("run", "run:recorded", "Tanh"):
        bench.visit(_named(name), _named(name).groups[0][1])
    assert {kernel for kernel, _, _ in bench.rows} == {*names, "Tanh"}
    assert _row(bench, "Tanh", (1 << 10,)).ns == pytest.approx(50 if records else 100, abs=1)


def test_a_kernel_that_cannot_be_recorded_is_measured_plain(machine: Arithmetic) -> None:
    """As it runs there."""
    machine.recorded = True
    bench = machine.bench()
    bench.begin(keep_open=False)
    machine.refuses_recording = True
    bench.visit(_named("Tanh"), ((1 << 10, 256),))
    assert _row(bench, "Tanh", (1 << 10,)).ns == pytest.approx(100)


@pytest.mark.parametrize("clock", [lambda: 7, iter(range(10**9, 0, -1)).__next__])
def test_a_clock_that_makes_no_sense_leaves_no_rows(clock: Callable[[], int], machine: Arithmetic) -> None:
    """It stands still, or goes back."""
    bench = Bench(Device.CUDA, 1.0, 0.001, clock)
    bench.visit(_named("run"), ((),))
    assert bench.rows == {}


def test_single_nodes_are_measured_in_order_until_the_limit(machine: Arithmetic) -> None:
    """The name of a row is that of the node behind a question mark; what came too late has a reason."""
    machine.node_ns |= {"Softplus": 9000.0, "Mish": 1e8}
    nodes = [measure.Node(name, name, (KIND,), (KIND,)) for name in ("Softplus", "Mish", "Elu")]
    rows, reasons = measure.measure_nodes(Device.CUDA, nodes, 0.3, clock=lambda: machine.now)
    assert [(row.kernel, row.ns) for row in rows] == [("?Softplus", pytest.approx(9000)), ("?Mish", pytest.approx(1e8))]
    assert list(reasons) == ["Elu"]


class Recorder:
    """Stands for the bench of a device, and keeps what it was asked to measure."""

    def __init__(self) -> None:
        self.device, self.spent_ns, self.limit_ns = Device.CPU, 0.0, 1.0
        self.bases: dict[Any, Any] = {}
        self.visits: list[tuple[str, bool]] = []
        self.points: list[tuple[Any, Any]] = []

    def visit(self, kernel: Any, points: Any, **how: Any) -> None:
        """Keep the kernel and its points, and whether it is measured whatever the time."""
        self.visits.append((kernel.name, how["needed"]))
        self.points.append((kernel, points))


@pytest.mark.parametrize("quick", [False, True])
def test_what_every_prediction_needs_is_measured_at_two_moments(quick: bool) -> None:
    """Whole runs and launches come first, and once more after all else, even without time for it."""
    bench = Recorder()
    measure_kernels([bench], quick=quick)  # type: ignore[list-item]  # it has what is used
    needed = {name for name, needed in bench.visits if needed}
    assert {"run", "launch", "input", "output"} <= needed
    for name in needed:
        first, second = [at for at, visit in enumerate(bench.visits) if visit == (name, True)]
        others = [at for at, (other, needed) in enumerate(bench.visits) if not needed]
        assert first < min(others)
        assert second > len(bench.visits) / 2 - 1
