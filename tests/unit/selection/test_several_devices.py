"""Several devices of one kind: each has its own profile, and its own identity in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlx_ort import Device, DevicePolicy, fastest_device_for
from rlx_ort.calibration import store
from rlx_ort.calibration.profile import CalibrationProfile, Row
from rlx_ort.providers import plugins
from rlx_ort.providers.base import Availability
from rlx_ort.providers.engine import runtime

FIRST, SECOND = Device("cuda"), Device("cuda:1")
CARDS = DevicePolicy.only([FIRST, SECOND])
BUS = {FIRST: "0000:01:00.0", SECOND: "0000:41:00.0"}


@pytest.fixture
def cards(machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two equal cards with different PCI addresses, and an empty cache folder."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(runtime, "runtime_problem", lambda: None)
    monkeypatch.setattr(runtime, "describe_runtime", lambda: "onnxruntime 1.31.1")
    monkeypatch.setattr(plugins, "find_plugins", lambda: ())
    store.forget()
    provider = machine.add("cuda", kernels=machine.kernels("Erf"), profile=machine.profile())
    monkeypatch.setattr(
        provider, "probe", lambda device: Availability(available=True, hardware="Card", identity=BUS[device])
    )
    yield machine
    store.forget()


def keep(device: Device, erf_ns: float) -> Path:
    """Store a profile in which a node of the graph takes this long, and return its file."""
    rows = (
        Row("run", (), 1000.0),
        Row("launch", (), 0.0),
        Row("MatMul", (64, 64 * 64), 1000.0),
        Row("Add", (1024,), erf_ns),
        Row("Erf", (1024,), erf_ns),
    )
    path = store.keep(device, CalibrationProfile(store.key_of(device), rows, measured="2026-11-01"))
    assert path is not None
    return path


def test_each_card_has_a_profile_of_its_own_with_its_identity(cards: Any) -> None:
    """Two files, and the key inside names the card's address."""
    files = {keep(FIRST, 100.0), keep(SECOND, 200.0)}
    store.forget()
    assert len(files) == 2
    for device in (FIRST, SECOND):
        profile = store.find(device).profile
        assert profile is not None
        assert (profile.key.device, profile.key.identity) == (device.label, BUS[device])


@pytest.mark.parametrize(("times", "wanted"), [((100.0, 9000.0), FIRST), ((9000.0, 100.0), SECOND)])
def test_the_faster_of_two_equal_cards_is_chosen(times: tuple[float, float], wanted: Device, cards: Any) -> None:
    """A card that another program keeps busy was measured to be slower; the index decides nothing."""
    keep(FIRST, times[0])
    keep(SECOND, times[1])
    assert fastest_device_for(cards.chain("Erf", shape=(32, 32)), CARDS) == wanted


def test_a_profile_of_a_card_that_moved_to_another_slot_is_ignored(cards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address differs, and the reason says so."""
    keep(FIRST, 100.0)
    monkeypatch.setitem(BUS, FIRST, "0000:81:00.0")
    cards.providers.register(cards.providers.for_device(FIRST))  # is probed again
    store.forget()
    found = store.find(FIRST)
    assert found.profile is None
    assert "identity is '0000:81:00.0' here and '0000:01:00.0' there" in found.reason
