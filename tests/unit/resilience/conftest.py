"""A machine with a device that has faults, which predictions prefer, and a CPU that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fault_provider import Doubling, FaultProvider, doubled, until

from rlx_ort import GraphDevices, Resilience
from rlx_ort.providers import registry
from rlx_ort.resilience.failover import Failover


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000_000

    def __call__(self) -> int:
        return self.ns

    def move(self, seconds: float) -> None:
        """Let time pass."""
        self.ns += int(seconds * 1e9)


@pytest.fixture
def clock() -> Clock:
    """Return a clock that the test moves."""
    return Clock()


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProvider]:
    """Replace the process's registry by one with the faulty device and the CPU."""
    provider = FaultProvider(Doubling())
    known = registry.ProviderRegistry((Doubling(), provider))
    monkeypatch.setattr(registry, "default_registry", lambda: known)
    yield provider
    provider.recover()
    until(lambda: not provider.inside)


@pytest.fixture
def make(fault: FaultProvider, clock: Clock) -> Callable[..., GraphDevices]:
    """Return a function that makes a resilient runner of `x + x` by that clock, without a bridge by default."""

    def runner(graph: Any = None, options: Any = None, **settings: Any) -> GraphDevices:
        made = GraphDevices(graph or doubled(), options=options)
        made._failover = Failover(made._sessions, Resilience(**{"bridge": False, **settings}), clock)
        return made

    return runner
