"""What every test relies on: a clean environment, the devices that are here, and repeatable generated cases."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from rlx_ort import device as device_module
from rlx_ort import environment
from rlx_ort.device import Device
from rlx_ort.providers.base import Availability

REQUIRE_WEBGPU = "RLX_REQUIRE_WEBGPU"
"""When set to 1, a test that needs WebGPU fails where it would be skipped; read before variables are cleared."""

hypothesis.settings.register_profile("rlx", deadline=None, derandomize=True, max_examples=50, print_blob=True)
hypothesis.settings.load_profile("rlx")

_webgpu_required = os.environ.get(REQUIRE_WEBGPU, "") not in ("", "0")


def webgpu_availability() -> Availability:
    """Return whether WebGPU works here; the registry remembers the answer."""
    from rlx_ort.providers.registry import default_registry

    return default_registry().availability(Device.WEBGPU)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or fail where it is required, a test that needs a WebGPU device which is not here."""
    if item.get_closest_marker("webgpu") is None:
        return
    found = webgpu_availability()
    if found.available:
        return
    reason = f"no WebGPU device: {found.reason} {found.remedy}"
    if _webgpu_required:
        pytest.fail(f"{REQUIRE_WEBGPU} is set, and there is {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cache folder of this run of the tests, which is empty at its start."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> Iterator[None]:
    """Clear every RLX_* variable and override, so that no test depends on the caller's shell or cache."""
    for name in [name for name in os.environ if name.startswith(environment.PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RLX_CACHE_DIR", str(cache_folder))
    environment.clear_overrides()
    yield
    environment.clear_overrides()


@pytest.fixture(autouse=True)
def known_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget after each test the device kinds that its providers brought, so that the built-in ones are known."""
    for table in ("_kinds", "_spellings"):
        monkeypatch.setattr(device_module, table, dict(getattr(device_module, table)))


@pytest.fixture(params=["cpu", pytest.param("webgpu", marks=pytest.mark.webgpu)])
def device(request: pytest.FixtureRequest) -> Device:
    """Return each device that tests run on: the CPU always, WebGPU where it works."""
    return Device(request.param)
