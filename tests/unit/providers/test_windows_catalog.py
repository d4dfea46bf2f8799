"""Providers of the Windows ML catalog, with a module in the place of `windowsml`, which exists on Windows only."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rlx_ort.errors import EngineError
from rlx_ort.providers import plugins
from rlx_ort.providers.plugins import catalog_providers, fetch_provider


@pytest.fixture
def readied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Put a `windowsml` with one provider that is there and one that is offered in place; return what was readied."""
    library = tmp_path / "qnn.dll"
    library.write_bytes(b"")
    calls: list[str] = []

    def provider(name: str, path: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, version="1.8.30.0", library_path=path, ensure_ready=lambda: calls.append(name)
        )

    def failing() -> None:
        raise RuntimeError("0x80070490")

    offered = [provider("QNNExecutionProvider", str(library)), provider("OpenVINOExecutionProvider", "")]
    offered.append(SimpleNamespace(name="Broken", version="1", library_path="relative.dll", ensure_ready=failing))
    module = ModuleType("windowsml")
    module.EpCatalog = lambda: SimpleNamespace(find_all_providers=lambda: list(offered))  # type: ignore[attr-defined]  # it stands for a class
    monkeypatch.setitem(sys.modules, "windowsml", module)
    monkeypatch.setattr(plugins.sys, "platform", "win32")
    monkeypatch.setattr(plugins, "_catalogs", [])
    return calls


def test_a_provider_that_windows_has_is_a_plugin_with_its_library(readied, tmp_path):
    """Reading the catalog downloads nothing."""
    found = {plugin.ep_names[0]: (plugin.library, plugin.problem) for plugin in catalog_providers()}
    assert found["QNNExecutionProvider"] == (tmp_path / "qnn.dll", "")
    assert readied == []


@pytest.mark.parametrize("name", ["OpenVINOExecutionProvider", "Broken"])
def test_a_provider_that_is_only_offered_says_how_to_get_it(readied, name):
    """Also a path that is not absolute is none: it would be looked for where others may write."""
    found = {plugin.ep_names[0]: (plugin.library, plugin.problem) for plugin in catalog_providers()}
    assert found[name][0] is None
    assert f"fetch_provider({name!r})" in found[name][1]


def test_fetching_asks_windows(readied):
    """And an error of Windows is one of ours."""
    fetch_provider("OpenVINOExecutionProvider")
    assert readied == ["OpenVINOExecutionProvider"]
    with pytest.raises(EngineError, match="0x80070490"):
        fetch_provider("Broken")
    with pytest.raises(EngineError, match="offers no provider 'Nothing'"):
        fetch_provider("Nothing")


def test_a_provider_of_windows_is_registered_like_a_plugin(readied, tmp_path, monkeypatch):
    """By its own name and library; several of the catalog do not stand for each other."""
    monkeypatch.setattr(plugins, "_registered", {})
    registered: list[tuple[str, str]] = []
    engine = SimpleNamespace(
        __version__="1.31.1", register_execution_provider_library=lambda name, path: registered.append((name, path))
    )
    found = {plugin.ep_names: plugin for plugin in plugins.find_plugins.__wrapped__()}
    assert plugins.register_plugin(found["QNNExecutionProvider",], engine, (RuntimeError,)) is None
    problem = plugins.register_plugin(found["OpenVINOExecutionProvider",], engine, (RuntimeError,))
    assert registered == [("QNNExecutionProvider", str(tmp_path / "qnn.dll"))]
    assert problem is not None
    assert "has not downloaded it" in problem.reason


def test_a_catalog_that_cannot_be_read_is_none(readied, monkeypatch, caplog):
    """An older Windows has the module and no catalog."""

    def failing() -> None:
        raise OSError("the flat API is missing")

    monkeypatch.setattr(sys.modules["windowsml"], "EpCatalog", failing)
    assert list(catalog_providers()) == []
    assert "the flat API is missing" in caplog.text


def test_other_systems_have_no_catalog(readied, monkeypatch):
    """The module is not even imported there."""
    monkeypatch.setattr(plugins.sys, "platform", "linux")
    monkeypatch.setitem(sys.modules, "windowsml", None)
    assert list(catalog_providers()) == []
