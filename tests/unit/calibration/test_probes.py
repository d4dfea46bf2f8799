"""How the time of a plan is shared out among its series."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from rlx_ort.calibration import probes
from rlx_ort.calibration.prober import Prober
from rlx_ort.calibration.series import Point, Series
from rlx_ort.ir.graph import Graph

_MS = 1_000_000.0


class Clockwork:
    """Stands for a prober whose series take what they are told to, whatever time they are given."""

    def __init__(self, taken_ns: float) -> None:
        self.budget = SimpleNamespace(elapsed_ns=0.0, limit_ns=1000 * _MS)
        self.hurried = False
        self.shares: list[float] = []
        self._taken_ns = taken_ns

    def step(self, what: str) -> None:
        """Hear what comes next."""

    def run(self, series: Series, deadline_ns: float, patience_ns: float) -> None:
        """Note the share, and let the time pass unless there is none left."""
        share = deadline_ns - self.budget.elapsed_ns
        self.shares.append(share)
        self.budget.elapsed_ns += self._taken_ns if share > 0 else 0.0


def shares(count: int, taken_ms: float, deadline_ms: float) -> list[float]:
    """Return the shares in ms of so many series, the last of which may find no time left."""
    prober = Clockwork(taken_ms * _MS)
    series = Series("op:Fake", lambda links: Graph("none"), (Point((1,), (1,), 1.0),))
    probes._follow(cast("Prober", cast("Any", prober)), [("fakes", [series] * count)], 1e12, deadline_ms * _MS)
    return [share / _MS for share in prober.shares]


def test_a_series_gets_at_least_what_one_takes() -> None:
    """Of 40 series 10 fit; a fortieth of the time for each would be too little for any, and all would be opened."""
    found = shares(40, 20.0, 200.0)
    assert all(share >= 20.0 for share in found[2:10])
    assert all(share <= 0.0 for share in found[10:])


def test_where_there_is_time_for_all_none_takes_the_others_share() -> None:
    """The first of ten may take twice its tenth."""
    assert shares(10, 5.0, 200.0)[0] == 40.0
