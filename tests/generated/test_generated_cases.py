"""Generated graphs run right, or are refused, in every way of running; and the generator finds the faults it is for.

`scripts/generate_cases.py` runs them for longer.
"""

from __future__ import annotations

import itertools
import time

import pytest
from generated.faults import FAULTS, planted
from generated.graphs import quiet
from generated.judge import judged
from generated.runs import KNOWN, Report, kept_seeds, run_cases

from rlx_ort.device import Device

SECONDS = {"cpu": 20.0, "webgpu": 14.0}
JUDGED = {"webgpu": 0.25}  # many of the kernels and dtypes are not there, and their graphs are refused
FAULT_S = 60.0
FIRST = 1204  # two layer norms with an epsilon each


def assert_clean(report: Report, judged_at_least: float) -> None:
    assert not report.failures, str(report)
    assert report.counts["equal"] > report.cases * judged_at_least, str(report)


@pytest.mark.slow
def test_fresh_graphs_run_right_in_every_way(device: Device) -> None:
    """Seeds of the clock, for a bounded time: no wrong answer, no crash, no error without a type."""
    first = int(time.time() * 1000) % 2**48
    assert_clean(
        run_cases(device.label, first=first, seconds=SECONDS.get(device.kind, 30.0)), JUDGED.get(device.kind, 0.5)
    )


def test_graphs_that_once_failed_run_right(device: Device) -> None:
    """Kept seeds stay right."""
    for seed in kept_seeds():
        report = run_cases(device.label, first=seed, graphs=1)
        assert report.graphs == 1
        assert not report.failures, str(report)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    """A graph of the first few is wrong with the fault, and right without it, in the same way."""
    end, ways, spoil = time.monotonic() + FAULT_S, [FAULTS[fault][1]], fault == "aliased array"
    for seed in itertools.count(FIRST):
        assert time.monotonic() < end, f"no graph of the seeds from {FIRST} to {seed} shows it"
        with quiet():
            with planted(fault):
                failures = judged(Device.CPU, seed, ways=ways, spoil=spoil)[1]
            if failures and not judged(Device.CPU, seed, ways=ways, spoil=spoil)[1]:
                return


def test_a_known_failure_has_a_reason() -> None:
    """Nothing is excused without a word."""
    assert all(entry["reason"] and entry["devices"] and entry["verdicts"] for entry in KNOWN)
