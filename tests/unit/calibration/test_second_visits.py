"""What is measured a second time, and in which order."""

from __future__ import annotations

import pytest

from rlx_ort.calibration import first_products, second_visits
from rlx_ort.calibration.prober import Prober
from rlx_ort.calibration.series import Point, Series
from rlx_ort.calibration.timing import Budget
from rlx_ort.device import Device
from rlx_ort.ir.graph import Graph


def series(probe: str, *rows: int, once: bool = False) -> Series:
    """Return a series of products or of anything else, over so many rows of 64."""
    points = tuple(Point((m, 64), (m, 64, 64), float(m)) for m in rows)
    return Series(probe, lambda links: Graph("none"), points, once=once)


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], bool]]:
    """What is measured again: probe, rows, and whether only what was disturbed."""
    found: list[tuple[str, tuple[int, ...], bool]] = []

    def revisit(prober: Prober, of: Series, deadline_ns: float, *, disturbed: bool = False, **kept: bool) -> None:
        found.append((of.probe, tuple(point.size[0] for point in of.points), disturbed))

    monkeypatch.setattr(Prober, "revisit", revisit)
    monkeypatch.setattr(first_products, "measure", lambda *rest, **more: found.append(("first", (), False)))
    return found


EVERY = [series("op:Add", 8), series("gemm", 1, 8, 512), series("gemm", 4, once=True)]


def prober_of(device: Device) -> Prober:
    """Return a prober that has all the time."""
    return Prober(device, Budget(100.0, 0.015, lambda: 0))


def test_a_cpu_measures_products_of_few_rows_in_another_session(
    visited: list[tuple[str, tuple[int, ...], bool]],
) -> None:
    """They come first, then what was disturbed, then the rest but for what is measured once."""
    second_visits.visit(prober_of(Device.CPU), EVERY, 1e12)
    assert visited[:2] == [("first", (), False), ("gemm", (1, 8), False)]
    assert {row[0] for row in visited[2:5]} == {"op:Add", "gemm"}
    assert all(disturbed for _, _, disturbed in visited[2:5])
    assert visited[5:] == [("op:Add", (8,), False)]


def test_an_accelerator_measures_again_what_was_disturbed_before_all_of_it(
    visited: list[tuple[str, tuple[int, ...], bool]],
) -> None:
    """Its products take the same in every session."""
    second_visits.visit(prober_of(Device.CUDA), EVERY, 1e12)
    assert all(disturbed for _, _, disturbed in visited[1:4])
    assert visited[4:] == [("op:Add", (8,), False), ("gemm", (1, 8, 512), False)]


@pytest.mark.parametrize(("side", "kept"), [(2048, "quickest"), (2560, "mean")])
def test_beyond_the_caches_the_mean_of_two_sessions_counts(
    monkeypatch: pytest.MonkeyPatch, side: int, kept: str
) -> None:
    """There most sessions are slow ones; a smaller weight is slow in few of them."""
    asked: list[set[str]] = []
    monkeypatch.setattr(
        Prober, "revisit", lambda *rest, **how: asked.append({name for name, wanted in how.items() if wanted})
    )
    monkeypatch.setattr(first_products, "measure", lambda *rest, **more: None)
    points = (Point((1, side), (1, side, side), 1.0),)
    second_visits.visit(prober_of(Device.CPU), [Series("gemm", lambda links: Graph("none"), points)], 1e12)
    assert asked[0] == {kept}
