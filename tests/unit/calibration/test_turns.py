"""Devices that are calibrated together measure in turn, and none counts the time of another as its own."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from rlx_ort.calibration import calibrate, probes, store
from rlx_ort.calibration.calibrate import calibrate_together
from rlx_ort.calibration.prober import Prober
from rlx_ort.calibration.profile import CalibrationProfile
from rlx_ort.calibration.turns import Turns
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError
from tests.unit.calibration.conftest import ROWS

_ROUNDS = 5


class Told:
    """A clock that everything measured moves by 100, and what was measured in which order."""

    def __init__(self) -> None:
        self.now = 0
        self.order: list[str] = []

    def measure(self, name: str) -> None:
        """Let the time of a measurement pass."""
        self.order.append(name)
        self.now += 100


def test_who_measures_changes_with_every_rest() -> None:
    """Of two that rest five times each, none measures twice in a row, and each has 500 ns of its own."""
    told = Told()
    turns = Turns(lambda: told.now)
    own: dict[str, int] = {}

    def work(name: str) -> None:
        with turns.join() as turn:
            for _ in range(_ROUNDS):
                told.measure(name)
                turn.rest()
            own[name] = turn.clock()

    turns.take()
    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    while len(turns._waiting) < len(threads):
        time.sleep(0.001)
    turns.leave()
    for thread in threads:
        thread.join(10)
    assert told.order in (["a", "b"] * _ROUNDS, ["b", "a"] * _ROUNDS)
    assert own == {"a": 100 * _ROUNDS, "b": 100 * _ROUNDS}


def test_one_alone_does_not_wait() -> None:
    """It rests without anybody to rest for."""
    with Turns(lambda: 7).join() as turn:
        turn.rest()
        assert turn.clock() == 7


def test_what_was_stopped_ends_with_its_next_turn() -> None:
    """An interrupt does not have to wait for a whole calibration."""
    turns = Turns()
    with turns.join() as turn:
        turns.stop()
        with pytest.raises(CalibrationError, match="stopped"):
            turn.rest()


def test_a_calibration_from_which_nothing_follows_is_an_error_and_not_kept(
    here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that fails at every product has no rates; the error says why each probe was skipped."""

    def measure(prober: Prober) -> None:
        prober.rows += [row for row in ROWS if row.probe != "gemm"]
        prober.skipped["gemm"] = "no MatMul"

    monkeypatch.setattr(probes, "measure", measure)
    found = calibrate_together(["cuda"], quick=True)[Device.CUDA]
    assert isinstance(found, CalibrationError)
    assert "no row of gemm" in str(found)
    assert "gemm: no MatMul" in str(found)
    assert store.find(Device.CUDA).profile is None


def test_each_device_gets_its_profile_and_a_failure_is_its_own(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA is measured although the device beside it does not exist."""

    def measure(prober: Prober) -> None:
        prober.rest()
        prober.rows += ROWS

    monkeypatch.setattr(probes, "measure", measure)
    monkeypatch.setattr(calibrate, "check", lambda profile, prober: profile)
    found = calibrate_together(["cuda", "tpu", Device.CUDA])
    assert list(found) == [Device.CUDA, Device("tpu")]
    profile = found[Device.CUDA]
    assert isinstance(profile, CalibrationProfile)
    assert profile.rows == ROWS
    assert store.find(Device.CUDA).profile == profile
    assert isinstance(found[Device("tpu")], CalibrationError)
