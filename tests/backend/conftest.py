"""Devices of the backend tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_provider import FaultProvider, until

from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.registry import default_registry, register_provider


@pytest.fixture
def fault() -> Iterator[FaultProvider]:
    """Register a device with faults that computes on the CPU, and take it away after the test."""
    provider = FaultProvider(CpuProvider())
    register_provider(provider)
    yield provider
    provider.recover()
    until(lambda: not provider.inside)
    del default_registry()._by_kind["fault"]
