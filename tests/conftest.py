"""What every test relies on: a clean environment, the devices that are here, and repeatable generated cases."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from device_facts import UNDER_WINE, known_failure, late_refusals
from outcomes import OutcomeLog

from rlx_ort import device as device_module
from rlx_ort import environment
from rlx_ort.device import Device
from rlx_ort.errors import DeviceParseError, EngineError, LegalizeError, PlacementError
from rlx_ort.options.compile_options import PlacementRule
from rlx_ort.providers import asking_child
from rlx_ort.providers.base import Availability
from rlx_ort.selection import questions

REQUIRE_WEBGPU = "RLX_REQUIRE_WEBGPU"
"""When set to 1, a test that needs WebGPU fails where it would be skipped; read before variables are cleared."""

LONGEST_S = 300.0
"""How long a test that is a coroutine may take."""

hypothesis.settings.register_profile("rlx", deadline=None, derandomize=True, max_examples=50, print_blob=True)
hypothesis.settings.load_profile("rlx")

_late: dict[str, list[str]] = {}  # device kind -> the tests that it refused late
_webgpu_required = os.environ.get(REQUIRE_WEBGPU, "") not in ("", "0")


def availability(device: Device) -> Availability:
    """Return whether a device works here; the registry remembers the answer."""
    from rlx_ort.providers.registry import default_registry

    return default_registry().availability(device)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--device`."""
    what = "run the tests that take a device on this one, by default on cpu and webgpu; repeat it or separate by commas"
    parser.addoption("--device", action="append", default=[], metavar="NAME", help=what)
    parser.addoption("--shard", default="0/1", metavar="I/N", help="run each Nth test, from the Ith on")
    what = "append what becomes of each test as JSON; those that ended in an earlier call are not run again"
    parser.addoption("--outcomes", type=Path, metavar="FILE", help=what)
    parser.addoption("--at-most", type=int, default=0, metavar="N", help="with --outcomes, run N tests and no more")


def pytest_configure(config: pytest.Config) -> None:
    """Log outcomes where that is asked for, and let the providers of `--device` take their time to answer questions."""
    if config.getoption("device"):
        # seconds; beside other work they would be refused otherwise for what they take on an idle machine
        questions._BUDGET_S = asking_child._START_S = 120.0
    if config.getoption("outcomes") is not None:
        config.pluginmanager.register(OutcomeLog(config.getoption("outcomes"), config.getoption("at_most")))


def named_devices(config: pytest.Config) -> list[Device]:
    """Return the devices of `--device`, none by default."""
    names = [name for text in config.getoption("device") for name in text.split(",")]
    try:
        return list(dict.fromkeys(Device(name.strip()) for name in names))
    except DeviceParseError as err:
        raise pytest.UsageError(f"--device: {err}") from err


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests of the `device` fixture on those of `--device`, by default on the CPU and, where it works, WebGPU."""
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    chosen = [name.strip() for names in given for name in (names.split(",") if isinstance(names, str) else names)]
    if "device" not in metafunc.fixturenames or "device" in chosen:
        return
    named = [device.label for device in named_devices(metafunc.config)]
    default = ["cpu", pytest.param("webgpu", marks=pytest.mark.webgpu)]
    metafunc.parametrize("device", named or default, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Expect the failures that are known of a test's device, and refuse devices of `--device` that do not work here."""
    first, count = (int(part) for part in config.getoption("shard").split("/"))
    items[:] = items[first::count]
    labels = [_label_of(item) for item in items]
    for device in named_devices(config):
        found = availability(device) if device.label in labels else None
        if found is not None and not found.available:
            raise pytest.UsageError(f"--device {device.label}: {found.reason} {found.remedy}")
    for item, label in zip(items, labels, strict=True):
        known = known_failure(label.partition(":")[0], item.nodeid) if label else None
        if known is None and UNDER_WINE:
            known = known_failure("wine", item.nodeid)
        if known is not None:
            item.add_marker(pytest.mark.xfail(reason=known.reason, strict=True, run=not known.crashes))


def pytest_collection_finish() -> None:
    """Keep the collected tests from garbage collection, which takes a quarter of a second over all of them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Skip a test of what a device does not take, where its capability says so, and count where it does not.

    On devices whose data allows a number of such late refusals they are expected failures.
    """
    outcome = yield
    label = _label_of(item)
    error = call.excinfo.value if call.excinfo is not None and call.when == "call" else None
    if error is None or not label or not _is_refusal(error):
        return
    report = outcome.get_result()
    if not report.failed:
        return
    refused = _judged(label, call.excinfo)
    if refused:
        report.outcome, report.longrepr = "skipped", (*item.location[:2], f"not taken by {label}: {refused}")
    elif late_refusals(label.partition(":")[0]):
        _late.setdefault(label.partition(":")[0], []).append(item.nodeid)
        report.outcome, report.wasxfail = "skipped", f"refused late: {str(error).splitlines()[0]}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a device refused late more often than its data allows."""
    if any(len(tests) > late_refusals(kind) for kind, tests in _late.items()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how often each device refused late."""
    for kind, tests in _late.items():
        terminalreporter.write_line(f"{kind} refused {len(tests)} tests late; its data allows {late_refusals(kind)}")


def _is_refusal(error: BaseException) -> bool:
    """Whether a device refused a graph when it was opened, instead of the capability judgement before."""
    refused = isinstance(error, EngineError) and "did not take the model" in str(error)
    return refused or isinstance(error, (LegalizeError, PlacementError))


def _judged(label: str, info: pytest.ExceptionInfo[BaseException] | None) -> str:
    """Return why the capability of a compiler refuses the graph whose session failed to open, or nothing."""
    from rlx_ort.providers.registry import provider_of

    provider = provider_of(Device(label))
    if provider is None or not provider.compiles:
        return ""  # what a provider with kernels does not take is known, and no test asks for it
    from rlx_ort.execution.engine import EngineSlot
    from rlx_ort.selection.support import support_of

    if info is not None and isinstance(info.value, LegalizeError) and info.value.report is not None:
        return str(info.value).splitlines()[0]
    for entry in reversed(info.traceback if info is not None else []):
        slot = entry.frame.f_locals.get("self")
        if isinstance(slot, EngineSlot) and slot.graph is not None:
            options = slot.options.with_(placement=PlacementRule.STRICT)
            return support_of(slot.device, slot.graph, options).blocker or ""
    return ""


def _label_of(item: pytest.Item) -> str:
    """Return the device that a test takes or is marked with, or nothing."""
    marked = "webgpu" if item.get_closest_marker("webgpu") is not None else ""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return str(params.get("device", marked))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or fail where it is required, a test that needs a WebGPU device which is not here."""
    if item.get_closest_marker("webgpu") is None:
        return
    found = availability(Device.WEBGPU)
    if found.available:
        return
    reason = f"no WebGPU device: {found.reason} {found.remedy}"
    if _webgpu_required:
        pytest.fail(f"{REQUIRE_WEBGPU} is set, and there is {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in an event loop of its own; one that waits for ever fails."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), LONGEST_S))
    return True


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


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device:
    """Return each device that tests run on, see `--device`."""
    return Device(request.param)
