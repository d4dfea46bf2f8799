"""A store in a temporary folder, and a device that needs no ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlx_ort import Device, environment
from rlx_ort.calibration import store
from rlx_ort.calibration.profile import CalibrationProfile, ProfileKey, Row
from rlx_ort.providers import plugins, registry
from rlx_ort.providers.base import Availability, CostProfile, EngineSession, KernelClaim, Provider, SessionRequest
from rlx_ort.providers.engine import runtime

ROWS = (
    Row("run", (), 10_000.0),
    Row("launch", (), 1_000.0),
    Row("input", (), 500.0),
    Row("output", (), 300.0),
    Row("MatMul", (1, 4096), 2_000.0),
    Row("MatMul", (64, 4096), 8_000.0),
    Row("Add", (1024,), 1_000.0),
    Row("Add", (1_048_576,), 100_000.0),
)


class Fake(Provider):
    """A provider whose hardware the test names."""

    name = "fake"
    kinds = ("cuda",)
    ep_name = "FakeExecutionProvider"

    def __init__(self, hardware: str, driver: str) -> None:
        self.answer = Availability(available=True, hardware=hardware, driver=driver)

    def probe(self, device: Device) -> Availability:
        """Return that the device works."""
        return self.answer

    def open(self, request: SessionRequest) -> EngineSession:
        """Fail the test: the store opens nothing."""
        raise AssertionError("a session was opened")

    def default_profile(self, device: Device) -> CostProfile | None:
        """Return no profile."""
        return None

    def claims(self) -> Sequence[KernelClaim] | None:
        """Return that kernels cannot be listed."""
        return None


class Here:
    """The machine of a test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = monkeypatch
        self.install("Card 1", "500.1")

    def install(self, hardware: str, driver: str, engine: str = "onnxruntime 1.31.1") -> None:
        """Replace the card, its driver and the engine; the process forgets what it knew."""
        providers = registry.ProviderRegistry((Fake(hardware, driver),))
        self._patch.setattr(registry, "default_registry", lambda: providers)
        self._patch.setattr(runtime, "describe_runtime", lambda: engine)
        store.forget()

    @staticmethod
    def profile(**changes: Any) -> CalibrationProfile:
        """Return a profile of the card that is there."""
        given: dict[str, Any] = {
            "key": store.key_of(Device.CUDA),
            "rows": ROWS,
            "measured": "2026-11-01T00:00:00+00:00",
        }
        return CalibrationProfile(**(given | changes))

    @property
    def file(self) -> Path:
        """The file the card's profile is kept in."""
        key: ProfileKey = store.key_of(Device.CUDA)
        return self.folder / "calibration" / key.file_name


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """A machine with one card and an empty cache folder."""
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    environment.clear_overrides()
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(runtime, "runtime_problem", lambda: None)
    monkeypatch.setattr(plugins, "find_plugins", lambda: ())
    yield Here(tmp_path, monkeypatch)
    store.forget()
