"""What a large input takes beyond a small one, on a device whose times are arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from arithmetic_device import ArithmeticDevice

from rlx_ort.calibration import probe_overheads
from rlx_ort.device import Device

_SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes
_NEW_SESSION_RUNS, _NEW_SESSION_NS = 500, 20_000


class Uploads:
    """An element takes a nanosecond; the first runs of the session all take as much longer."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, ops: list[str], feeds: dict[str, Any]) -> int:
        """Return what a run takes."""
        if "data" not in feeds:
            return int(feeds["shape"][0])
        self.runs += 1
        return len(feeds["data"]) + (_NEW_SESSION_NS if self.runs <= _NEW_SESSION_RUNS else 0)


def test_an_upload_is_what_its_bytes_take_beyond_four_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which holds for small ones too, although the first runs of the session were slow."""
    machine = ArithmeticDevice(monkeypatch, Uploads(), Device("cuda"))
    probe_overheads.transfers(machine.prober, 1e15)
    assert machine.rows("upload") == pytest.approx({(nbytes,): nbytes / 4 - 4 for nbytes in _SIZES})


def test_a_readback_is_what_is_left_without_making_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making it and making it for the host take as long here."""
    machine = ArithmeticDevice(monkeypatch, Uploads(), Device("cuda"))
    probe_overheads.transfers(machine.prober, 1e15)
    assert machine.rows("readback") == {(nbytes,): 0.0 for nbytes in _SIZES}
