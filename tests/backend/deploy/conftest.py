"""Packages, with a compile cache of each test's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_packages.packages import make

from rlx_ort import Device, warm_package


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(params=[False, True], ids=["file", "folder"])
def warmed(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a package that was warmed for the CPU."""
    path = make(tmp_path / "small.ortpackage", folder=request.param)
    assert warm_package(path, [Device.CPU])[0].starts
    return path
