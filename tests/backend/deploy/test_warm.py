"""`package warm` and `start_package`: what was warmed is used, and only the right result comes out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from sample_packages.packages import SIZE, X, assert_right, make, reference

from rlx_ort import Device, RlxError, open_package, start_package, warm_package
from rlx_ort.errors import DeviceError, DeviceParseError, IntegrityError, NoViableDeviceError, PackageError
from rlx_ort.options.compile_options import CacheUse, CompileOptions, WeightSharing
from rlx_ort.providers.engine.compiled.models import watched
from rlx_ort.providers.engine.compiled.store import default_store

INPUTS = {"x": X}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a package."""
    return make(tmp_path / "small.ortpackage")


class Way(NamedTuple):
    """A way to start a package that was warmed, to run it, and to see whether it runs without its graph."""

    open: Callable[..., Any]
    run: Callable[..., Any]
    is_quick: Callable[[Any], bool]


START = Way(start_package, lambda opened, inputs=INPUTS: opened.run(inputs), lambda opened: opened.quick)
OPEN = Way(
    open_package, lambda opened, inputs=INPUTS: opened.run("cpu", inputs), lambda opened: "started on" in repr(opened)
)
RESOLVED = OPEN._replace(run=lambda opened, inputs=INPUTS: opened.run_resolved(inputs, Device.CPU))
TURNED = OPEN._replace(run=lambda opened, inputs=INPUTS: opened.run(inputs, device="cpu"))
both_ways = pytest.mark.parametrize("way", [START, OPEN], ids=["start", "open"])


def answer(run: Callable[[], Any]) -> Any:
    """Return what a call gives: the outputs, or the type and text of the error."""
    try:
        return [output.tolist() for output in run()]
    except RlxError as err:
        return type(err), str(err)


def test_a_session_opened_after_warming_uses_what_was_kept(package, device):
    """Warming twice makes one entry, and a session of the package opens it."""
    rows = [warm_package(package, [device])[0] for _ in range(2)]
    assert [row.problem for row in rows] == ["", ""]
    assert rows[0].entry == rows[1].entry
    with watched() as openings, open_package(package) as runner:
        assert_right(runner.compile(device).run({"x": X})[0])
    assert [opening.entry.digest for opening in openings] == [rows[0].entry]


def test_a_package_that_was_not_warmed_writes_nothing(package):
    """Opening a package costs no disk."""
    with open_package(package) as runner:
        assert_right(runner.run("cpu", {"x": X})[0])
    assert default_store().entries() == []


def test_warming_without_devices_takes_those_of_the_policy(package):
    """All devices that the package may run on, the CPU among them."""
    rows = warm_package(package)
    assert [bool(row.entry) and not row.problem for row in rows if row.device == "cpu"] == [True]
    assert [row.device for row in rows if not row.entry and not row.problem] == []


@pytest.mark.parametrize("named", ["cpu", ["cpu"], Device.CPU], ids=str)
def test_devices_are_named_as_anywhere_else(package: Path, named: Device | str | list[str]) -> None:
    """By a name, names or devices; a name that is none is refused before anything is compiled."""
    assert [row.device for row in warm_package(package, named)] == ["cpu"]
    with pytest.raises(DeviceParseError, match="cqu"):
        warm_package(package, ["cqu"])


def test_a_device_that_cannot_be_had_is_a_problem_and_not_the_end(package):
    """The other devices are warmed all the same."""
    rows = warm_package(package, [Device("cuda:7"), Device.CPU])
    assert "CUDA" in rows[0].problem
    assert (rows[1].problem, rows[1].starts) == ("", True)


@pytest.mark.parametrize("way", [START, OPEN, RESOLVED, TURNED], ids=["start", "open", "resolved", "inputs first"])
def test_a_warmed_package_runs_without_its_graph(warmed: Path, way: Way) -> None:
    """The results are right before and after the weights are packed, whoever names the CPU."""
    with way.open(warmed) as opened:
        for _ in range(8):
            assert_right(way.run(opened)[0])
        opened._quick.settle()
        assert_right(way.run(opened)[0])
        assert way.is_quick(opened)


def test_a_warmed_package_says_where_it_ran(warmed: Path) -> None:
    """The device before the graph was read, the placement as well from then on."""
    with open_package(warmed) as opened:
        first = opened.run("cpu", INPUTS)
        assert (first.device, first.placement) == (Device.CPU, None)
        later = opened.run(INPUTS)  # a choice reads the graph
        assert later.placement is opened.placement(later.device)


def test_a_denied_device_starts_nothing(package, monkeypatch):
    """Not from the cache either, which a start takes without looking at the package's own policy."""
    warm_package(package, [Device.CPU])
    monkeypatch.setenv("RLX_DENY_DEVICES", "cpu")
    with pytest.raises(NoViableDeviceError, match="deny: cpu"):
        start_package(package)
    assert "cpu" not in [row.device for row in warm_package(package)]


@pytest.mark.parametrize(
    ("opened", "run", "heavy"),
    [
        ("start_package", "", {"rlx_ort.adaptive", "filelock", "importlib.metadata"}),
        ("open_package", "'cpu', ", {"rlx_ort.adaptive", "rlx_ort.execution.compiled"}),
    ],
    ids=["start", "open"],
)
def test_the_first_result_needs_no_graph_and_no_onnx(
    warmed: Path, tmp_path: Path, opened: str, run: str, heavy: set[str]
) -> None:
    """A process that opens a warmed package and runs it imports neither ONNX nor the IR, nor the cost models."""
    np.save(tmp_path / "x.npy", X)
    program = f"""
import json, sys
import numpy as np
import rlx_ort
opened = rlx_ort.{opened}({str(warmed)!r})
result = opened.run({run}{{"x": np.load({str(tmp_path / "x.npy")!r})}})[0]
heavy = {heavy | {"onnx", "rlx_ort.ir.graph", "psutil"}!r}
print(json.dumps([sorted(heavy.intersection(sys.modules)), float(result.sum())]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    found, total = json.loads(done.stdout)
    assert found == []
    assert total == pytest.approx(reference(X).sum(), rel=1e-3)


def test_a_package_that_is_not_in_the_cache_is_opened_in_full(package):
    """The answer is the same, a little later."""
    with start_package(package) as started:
        assert not started.quick
        assert_right(started.run({"x": X})[0])


def test_another_package_of_the_same_name_does_not_start_from_the_old_one(package, tmp_path):
    """The note belongs to the digest of the index, not to the path."""
    warm_package(package, [Device.CPU])
    make(tmp_path / "other.ortpackage", seed=1).replace(package)
    with start_package(package) as started:
        assert not started.quick
        assert_right(started.run({"x": X})[0], seed=1)


@both_ways
@pytest.mark.parametrize(("name", "found"), [("cpu_facts", {"cpu": "another"}), ("_installation", "newer")])
def test_another_processor_or_version_does_not_start_from_what_is_kept(
    warmed: Path, way: Way, monkeypatch: pytest.MonkeyPatch, name: str, found: object
) -> None:
    """What is kept is of one processor, one build of ONNX Runtime and one version, which may write another model."""
    monkeypatch.setattr(f"rlx_ort.providers.engine.compiled.starts.{name}", lambda: found)
    with way.open(warmed) as opened:
        assert not way.is_quick(opened)


def test_a_damaged_entry_does_not_start(package):
    """It is dropped, and the package is opened in full."""
    (row,) = warm_package(package, [Device.CPU])
    model = default_store().root / row.entry / "model.onnx"
    model.write_bytes(model.read_bytes()[:-1])
    with start_package(package) as started:
        assert not started.quick
        assert_right(started.run({"x": X})[0])


@pytest.mark.parametrize(
    ("way", "variable"),
    [
        *((way, variable) for way in (START, OPEN) for variable in ("RLX_CACHE=off", "RLX_KERNEL_DISPATCH=common")),
        (OPEN, "RLX_DISPATCH_REPORT=1"),
    ],
)
def test_variables_that_change_the_session_count(
    warmed: Path, way: Way, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """What was warmed was warmed without them."""
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    with watched() as openings, way.open(warmed) as opened:
        assert not way.is_quick(opened)
        assert_right(way.run(opened)[0])
    assert name != "RLX_CACHE" or openings == []


@pytest.fixture(params=["variable", "argument"])
def signature(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Path]:
    """Ask for a signature by what is no key, and return the arguments that do."""
    key = tmp_path / "key.pem"
    key.write_text("no key", encoding="ascii")
    if request.param == "argument":
        return {"require_signature": key}
    monkeypatch.setenv("RLX_PACKAGE_KEY", str(key))
    return {}


@both_ways
def test_a_signature_that_is_asked_for_is_looked_at(warmed: Path, way: Way, signature: dict[str, Path]) -> None:
    """The cache does not stand in for it."""
    with pytest.raises(PackageError):
        way.open(warmed, **signature)


def test_a_package_that_wants_its_golden_cases_run_first_does_not_start_without_them(tmp_path):
    """They are run when it is opened in full."""
    path = make(tmp_path / "careful.ortpackage", verify_on_first_use=True)
    (row,) = warm_package(path, [Device.CPU])
    assert (row.problem, row.starts) == ("", False)
    with start_package(path) as started:
        assert not started.quick


@both_ways
@pytest.mark.parametrize(
    "inputs",
    [
        *({}, {"y": X}, {"x": X, "y": X}, {"x": X[0]}, {"x": X[:, :-1]}),
        *({"x": X.astype(np.float64)}, {"x": X > 0}, {"x": X.tolist()}),
    ],
    ids=["none", "another", "too many", "rank", "size", "wider", "bool", "list"],
)
def test_inputs_that_do_not_fit_get_the_graph_s_own_answer(warmed: Path, way: Way, inputs: dict[str, Any]) -> None:
    """The quick way takes exact arrays only; all else is refused or converted as everywhere."""
    with way.open(warmed) as quick, open_package(warmed, options=CompileOptions()) as full:
        assert (way.is_quick(quick), OPEN.is_quick(full)) == (True, False)
        assert answer(lambda: way.run(quick, inputs)) == answer(lambda: full.run("cpu", inputs))


def test_a_path_without_a_package_is_an_error(tmp_path):
    """So is a device that cannot be had."""
    (tmp_path / "zip").write_bytes(b"PK no zip")
    for name in ("nothing", "zip"):
        with pytest.raises(PackageError, match=name):
            start_package(tmp_path / name)
    with pytest.raises(DeviceError):
        start_package(make(tmp_path / "small.ortpackage"), "cuda:7")


def test_options_of_the_caller_come_before_the_package(package):
    """A caller may ask a package to be kept, or kept out."""
    with open_package(package, options=CompileOptions(cache=CacheUse.ON)) as runner:
        runner.run("cpu", {"x": X})
    assert len(default_store().entries()) == 1
    with watched() as openings, open_package(package, options=CompileOptions(cache=CacheUse.OFF)) as runner:
        runner.run("cpu", {"x": np.ones((1, SIZE), np.float32)})
    assert openings == []


def test_private_weights_come_from_no_file_of_the_cache(package):
    """They are copied and hashed, and what was warmed is mapped from a file that others may write to."""
    warm_package(package, [Device.CPU])
    with watched() as openings, open_package(package, private=True) as runner:
        assert_right(runner.run("cpu", {"x": X})[0])
    assert openings == []


@pytest.mark.parametrize(
    "options",
    [CompileOptions(cache=CacheUse.ON), CompileOptions(sharing=WeightSharing.PREPACKED)],
    ids=["on", "packed"],
)
def test_private_weights_from_the_cache_cannot_be_had(package, options):
    """Asking for both raises an error, since one of the two would not hold."""
    with pytest.raises(PackageError, match="private=True"):
        open_package(package, options=options, private=True)


def test_a_package_without_the_signature_that_is_asked_for_is_not_warmed(package, signature):
    """The cache is filled from nothing that could not be opened."""
    with pytest.raises(PackageError):
        warm_package(package, [Device.CPU], **signature)
    assert default_store().entries() == []


@pytest.mark.parametrize("wanted", [{"sha256": "0" * 64}, {"min_serial": 6}], ids=["digest", "serial"])
def test_another_package_than_the_one_asked_for_is_not_warmed(package, wanted):
    """As `open_package` refuses it."""
    with pytest.raises(IntegrityError):
        warm_package(package, [Device.CPU], **wanted)
    assert default_store().entries() == []
