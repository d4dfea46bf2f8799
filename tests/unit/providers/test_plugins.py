"""Plugin packages: found by name, trusted only as installed, registered once; and those that Windows has or offers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rlx_ort.errors import EngineError
from rlx_ort.providers import plugins
from rlx_ort.providers.engine.runtime import Problem
from rlx_ort.providers.plugins import Plugin, catalog_providers, fetch_provider, find_plugins, register_plugin


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Give each test an empty memory of plugins."""
    monkeypatch.setattr(plugins, "_registered", {})
    find_plugins.cache_clear()
    yield
    find_plugins.cache_clear()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a fake plugin package, alone on the path of distributions."""

    def write(name: str, module: str, code: str) -> Plugin:
        info = tmp_path / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n", encoding="utf-8")
        (info / "top_level.txt").write_text(module, encoding="utf-8")
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text(code, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, module, raising=False)
        return next(plugin for plugin in find_plugins() if plugin.distribution == name)

    return write


def code(path: str, names: str = "['FakeExecutionProvider']") -> str:
    return (
        "import pathlib\n"
        f"def get_library_path(): return {path}\n"
        f"def get_ep_names(): return {names}\n"
        "(pathlib.Path(__file__).parent / 'libfake.so').write_bytes(b'')\n"
    )


INSIDE = "str(pathlib.Path(__file__).parent / 'libfake.so')"


def test_an_installed_plugin_is_found_with_its_library(install):
    """Name, version, provider and absolute path are read."""
    plugin = install("onnxruntime-ep-fake1", "fake_ep_1", code(INSIDE))
    assert (plugin.version, plugin.ep_names, plugin.problem) == ("1.2", ("FakeExecutionProvider",), "")
    assert plugin.library is not None
    assert plugin.library.is_absolute()


@pytest.mark.parametrize(
    ("number", "text", "problem"),
    [
        (2, code("'libfake.so'"), "not part of"),
        (3, code("'/etc/hosts'"), "not part of"),
        (4, code("str(pathlib.Path(__file__).parent / 'absent.so')"), "missing"),
        (5, code(INSIDE, "[]"), "no execution provider"),
        (6, "import onnxruntime_ep_that_is_not_there", "does not import"),
        (7, "x = 1", "get_library_path"),
        (8, "def get_ep_names(): return ['E']\ndef get_library_path(): raise RuntimeError('two libraries')", "two lib"),
    ],
)
def test_a_plugin_that_cannot_be_trusted_or_read_says_why(install, number, text, problem):
    """Relative paths, paths outside of the package and broken modules have no library."""
    plugin = install(f"onnxruntime-ep-fake{number}", f"fake_ep_{number}", text)
    assert plugin.library is None
    assert problem in plugin.problem


@pytest.mark.parametrize(
    ("name", "offer"),
    [
        ("onnxruntime-ep-fake9", "def library_path(): return {}\ndef ep_name(): return 'FakeExecutionProvider'\n"),
        ("onnxruntime-fake10", "EP_NAME = 'FakeExecutionProvider'\ndef library_path(): return {}\n"),
        ("fake11-ep-cpu", "REGISTRATION_NAME = 'FakeExecutionProvider'\ndef get_library_path() -> str: return {}\n"),
    ],
)
def test_a_plugin_is_recognised_by_what_it_offers(install, name, offer):
    """`onnxruntime-ep-mlx`, `onnxruntime-ggml` and `nxrt-ep-cpu` keep to other names than the convention's."""
    text = f"import pathlib\n{offer.format(INSIDE)}(pathlib.Path(__file__).parent / 'libfake.so').write_bytes(b'')\n"
    plugin = install(name, name.replace("-", "_"), text)
    assert (plugin.ep_names, plugin.problem) == (("FakeExecutionProvider",), "")


def test_a_package_that_offers_no_library_is_no_plugin_and_is_not_imported(install):
    """Extensions and tools of ONNX Runtime have similar names."""
    with pytest.raises(StopIteration):
        install("onnxruntime-fake12", "fake_12", "EP_NAME = 'x'\nraise RuntimeError('imported')")


class RefusedError(Exception):
    """Plays ONNX Runtime's Fail."""


class Engine:
    """Plays the part of ONNX Runtime that registers libraries."""

    __version__ = "1.31.1"

    def __init__(self, failure: str = "") -> None:
        self.failure = failure
        self.calls: list[tuple[str, str]] = []

    def register_execution_provider_library(self, name: str, path: str) -> None:
        self.calls.append((name, path))
        if self.failure:
            raise RefusedError(f"[ONNXRuntimeError] : 1 : FAIL : {self.failure}")


PLUGIN = Plugin("onnxruntime-ep-x", "0.1", ("XExecutionProvider",), Path(__file__).resolve())


def test_a_library_is_registered_once():
    """The second call does not reach ONNX Runtime."""
    engine = Engine()
    assert [register_plugin(PLUGIN, engine, (RefusedError,)) for _ in range(3)] == [None] * 3
    assert engine.calls == [("XExecutionProvider", str(PLUGIN.library))]


def test_a_library_that_is_already_registered_is_fine():
    """Somebody else in the process may have done it."""
    assert register_plugin(PLUGIN, Engine("EP library is already registered under X"), (RefusedError,)) is None


@pytest.mark.parametrize(
    ("failure", "reason", "remedy"),
    [
        ("libvulkan.so.1: cannot open shared object file: No such file", "libvulkan.so.1", "library it names"),
        ("undefined symbol: CreateEpFactories", "too old", "pip install --upgrade onnxruntime-ep-x"),
        ("The requested API version [31] is not available", "newer ONNX Runtime", "pip install --upgrade onnxruntime"),
        ("something else", "does not load", "--force-reinstall onnxruntime-ep-x"),
    ],
)
def test_a_library_that_does_not_load_says_why_and_what_to_do(failure, reason, remedy):
    """A missing library, a plugin older and one newer than the core are different problems."""
    problem = register_plugin(PLUGIN, Engine(failure), (RefusedError,))
    assert isinstance(problem, Problem)
    assert reason in problem.reason
    assert failure in problem.reason
    assert remedy in problem.remedy


def test_a_failed_library_is_not_loaded_again():
    """A failure is remembered for the process."""
    engine = Engine("broken")
    first = register_plugin(PLUGIN, engine, (RefusedError,))
    assert register_plugin(PLUGIN, engine, (RefusedError,)) is first
    assert len(engine.calls) == 1


def test_a_plugin_in_the_current_folder_is_not_imported(install, tmp_path, monkeypatch):
    """A folder that somebody works in may hold files from anywhere, and Python often has it on its path."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StopIteration):
        install("onnxruntime-ep-fake20", "fake_ep_20", code(INSIDE))
    assert "fake_ep_20" not in sys.modules
    assert not (tmp_path / "fake_ep_20" / "libfake.so").exists()


@pytest.mark.parametrize("imported", [False, True], ids=["new", "imported before"])
def test_a_module_of_the_current_folder_does_not_stand_in_for_an_installed_plugin(
    install, tmp_path, monkeypatch, imported
):
    """The installed module is imported; where the program has imported the other one, no library is loaded."""
    here = tmp_path / "here"
    (here / "fake_ep_21").mkdir(parents=True)
    (here / "fake_ep_21" / "__init__.py").write_text(code(INSIDE), encoding="utf-8")
    monkeypatch.chdir(here)
    install("onnxruntime-ep-fake21", "fake_ep_21", code(INSIDE))
    find_plugins.cache_clear()
    monkeypatch.delitem(sys.modules, "fake_ep_21")
    monkeypatch.syspath_prepend("")
    if imported:
        importlib.import_module("fake_ep_21")
    plugin = next(plugin for plugin in find_plugins() if plugin.distribution == "onnxruntime-ep-fake21")
    monkeypatch.delitem(sys.modules, "fake_ep_21")
    if imported:
        assert plugin.library is None
        assert "lies in the current folder" in plugin.problem
    else:
        assert plugin.library == tmp_path / "fake_ep_21" / "libfake.so"


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
