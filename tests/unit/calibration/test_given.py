"""Operators over tensors that are given to a run, on a device whose times are arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from arithmetic_device import ArithmeticDevice

from rlx_ort.calibration import probe_given
from rlx_ort.device import Device

_ROW, _FIRST_ROW, _ADD_A_THOUSAND, _REDUCED_ROW = 40, 500, 30, 90


def work(slower: int = 1) -> Callable[[list[str], dict[str, Any]], int]:
    """Return what runs take: additions so long a thousand elements, lookups and reductions so long a row."""

    def work_ns(ops: list[str], feeds: dict[str, Any]) -> int:
        if "Add" in ops:
            return slower * ops.count("Add") * len(feeds["x"]) * _ADD_A_THOUSAND // 1000
        if "x" in feeds:
            return slower * len(feeds["x"]) * _REDUCED_ROW * (1 + ("ReduceMax" in ops))
        return slower * (_FIRST_ROW + len(feeds["rows"]) * _ROW)

    return work_ns


def test_an_addition_is_a_share_of_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round trip is taken off, and no making of a tensor, since it is an input."""
    machine = ArithmeticDevice(monkeypatch, work())
    probe_given.measure(machine.prober, 1e15)
    expected = {(count,): count * _ADD_A_THOUSAND / 1000 for count in (1 << 23, 1 << 24)}
    assert machine.rows("op:Add") == pytest.approx(expected, rel=1e-3)


def test_a_slow_memory_is_not_measured_at_the_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five runs of the next size would take a tenth of what the calibration may."""
    machine = ArithmeticDevice(monkeypatch, work(slower=40))
    probe_given.measure(machine.prober, 1e15)
    assert list(machine.rows("op:Add")) == [(1 << 23,)]
    assert "16777216" in machine.prober.skipped["op:Add"]


def test_a_lookup_is_what_its_rows_take_beyond_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the usual length are the operator's, others say how a row's length tells."""
    machine = ArithmeticDevice(monkeypatch, work())
    probe_given.measure(machine.prober, 1e15)
    usual = {(count,): (count // 256 - 1) * _ROW for count in (1 << 10, 1 << 14, 1 << 18, 1 << 20)}
    assert machine.rows("op:Lookup") == pytest.approx(usual)
    assert machine.rows("rows:Lookup")[1 << 18, 64] == pytest.approx(((1 << 12) - 1) * _ROW)


@pytest.mark.parametrize(("name", "row"), [("SumOfGiven", _REDUCED_ROW), ("MaxOfGiven", 2 * _REDUCED_ROW)])
def test_a_reduction_is_what_its_rows_take_beyond_one(monkeypatch: pytest.MonkeyPatch, name: str, row: int) -> None:
    """Rows of 250 are the operator's, wide ones and those a page apart say how a row's length tells."""
    machine = ArithmeticDevice(monkeypatch, work())
    probe_given.measure(machine.prober, 1e15)
    usual = {(count,): (count // 250 - 1) * row for count in (1 << 14, 1 << 18, 1 << 20)}
    wide = {(count, width): (count // width - 1) * row for width in (2000, 2048) for count in (1 << 18, 1 << 22)}
    assert machine.rows(f"op:{name}") == pytest.approx(usual)
    assert machine.rows(f"rows:{name}") == pytest.approx(wide)


def test_a_slow_reduction_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a second is made twice: of one row, then of two sizes, and there are seven seconds."""
    machine = ArithmeticDevice(monkeypatch, lambda ops, feeds: 1_000_000_000 if "ReduceMax" in ops else 0)
    probe_given.measure(machine.prober, 7e9)
    assert list(machine.rows("op:MaxOfGiven")) == [(1 << 14,), (1 << 18,)]
    assert "(1048576, 250)" in machine.prober.skipped["op:MaxOfGiven"]


def test_an_accelerator_is_not_sent_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is opened, let alone measured."""
    machine = ArithmeticDevice(monkeypatch, work(), Device("cuda"))
    probe_given.measure(machine.prober, 1e15)
    assert (machine.opened, len(machine.prober.rows)) == (0, 1)
