"""Operators over tensors that are given to a run, on a device whose times are arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from rlx_ort.calibration import probe_given
from rlx_ort.calibration.prober import Prober
from rlx_ort.calibration.profile import Sample
from rlx_ort.calibration.timing import Budget
from rlx_ort.device import Device
from rlx_ort.ir.graph import Graph

_TRIP, _ROW, _FIRST_ROW = 3000, 40, 500
_ADD_A_THOUSAND = 30


class Machine:
    """A device on which an addition takes so long a thousand elements, and a lookup so long a row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: Device = Device.CPU, *, slower: int = 1) -> None:
        self.now, self.slower, self.opened = 0, slower, 0
        self.prober = Prober(device, Budget(1000.0, 0.015, lambda: self.now))
        self.prober.rows = [Sample("roundtrip", (), float(_TRIP))]
        monkeypatch.setattr(Prober, "compile", lambda prober, graph, options=None: Compiled(self, graph))

    def rows(self, probe: str) -> dict[tuple[int, ...], float]:
        """Return size -> ns of what was measured of a probe."""
        return {row.size: row.ns for row in self.prober.rows if row.probe == probe}


class Compiled:
    """A graph that is ready to run on such a device."""

    def __init__(self, machine: Machine, graph: Graph) -> None:
        self.machine = machine
        machine.opened += 1
        ops = [getattr(node.op, "op_type", "") for node in graph.nodes]
        self.additions = ops.count("Add")

    def run(self, feeds: dict[str, Any]) -> None:
        """Let the time of a run pass."""
        if self.additions:
            taken = self.additions * len(feeds["x"]) * _ADD_A_THOUSAND // 1000
        else:
            taken = _FIRST_ROW + len(feeds["rows"]) * _ROW
        self.machine.now += _TRIP + taken * self.machine.slower

    def close(self) -> None:
        """Do nothing."""


def test_an_addition_is_a_share_of_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round trip is taken off, and no making of a tensor, since it is an input."""
    machine = Machine(monkeypatch)
    probe_given.measure(machine.prober, 1e15)
    expected = {(count,): count * _ADD_A_THOUSAND / 1000 for count in (1 << 23, 1 << 24)}
    assert machine.rows("op:Add") == pytest.approx(expected, rel=1e-3)


def test_a_slow_memory_is_not_measured_at_the_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five runs of the next size would take a tenth of what the calibration may."""
    machine = Machine(monkeypatch, slower=40)
    probe_given.measure(machine.prober, 1e15)
    assert list(machine.rows("op:Add")) == [(1 << 23,)]
    assert "16777216" in machine.prober.skipped["op:Add"]


def test_a_lookup_is_what_its_rows_take_beyond_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the usual length are the operator's, others say how a row's length tells."""
    machine = Machine(monkeypatch)
    probe_given.measure(machine.prober, 1e15)
    usual = {(count,): (count // 256 - 1) * _ROW for count in (1 << 10, 1 << 14, 1 << 18, 1 << 20)}
    assert machine.rows("op:Lookup") == pytest.approx(usual)
    assert machine.rows("rows:Lookup")[1 << 18, 64] == pytest.approx(((1 << 12) - 1) * _ROW)


def test_an_accelerator_is_not_sent_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is opened, let alone measured."""
    machine = Machine(monkeypatch, Device("cuda"))
    probe_given.measure(machine.prober, 1e15)
    assert (machine.opened, len(machine.prober.rows)) == (0, 1)
