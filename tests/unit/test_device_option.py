"""`pytest --device` and the data about devices that it reads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import device_facts
import pytest
from device_facts import KnownFailure

from rlx_ort.device import Device

ROOT = Path(__file__).parents[2]
BARE = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""The environment of a pytest without plugins, which take half a second to load."""
KINDS = sorted(path.stem for path in device_facts.FOLDER.glob("*.toml"))
SUITE = """
import pytest

def test_runs_on(device):
    '''A test of the fixture.'''

@pytest.mark.parametrize(("number", "device"), [(1, "qnn")])
def test_names_its_own(number, device):
    '''A test that says itself where it runs.'''
"""


@pytest.fixture
def collect(tmp_path):
    """Return a function that lists, on a small suite beside our conftest.py, the tests for some `--device` options."""
    (tmp_path / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (tmp_path / "test_small.py").write_text(SUITE, encoding="utf-8")

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options]
        command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)]
        return subprocess.run(command, cwd=ROOT, env=BARE, capture_output=True, text=True, timeout=120, check=False)

    return run


def ids(done: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"::(\S+)", done.stdout)


def test_tests_run_on_the_cpu_and_webgpu_by_default(collect):
    """Without the option each test of the fixture is there twice."""
    assert ids(collect()) == ["test_runs_on[cpu]", "test_runs_on[webgpu]", "test_names_its_own[1-qnn]"]


@pytest.mark.parametrize("options", [["--device=cpu,cpu:0"], ["--device", "cpu", "--device=CPU"]])
def test_tests_run_on_the_named_devices(collect, options):
    """The option names devices, separated by commas or repeated; a test that names its own keeps it."""
    assert ids(collect(*options)) == ["test_runs_on[cpu]", "test_names_its_own[1-qnn]"]


@pytest.mark.parametrize(
    ("name", "reason"), [("tpu", "--device tpu: no ONNX Runtime execution provider serves"), ("cpux", "cpux")]
)
def test_a_device_that_does_not_work_stops_the_tests(collect, name, reason):
    """A named device is used or refused with the reason; its tests are not skipped."""
    done = collect("--device", name)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert reason in done.stdout + done.stderr


LATE = """
import pytest
from rlx_ort.errors import EngineError, PlacementError

@pytest.mark.parametrize("device", ["qnn"])
@pytest.mark.parametrize("error", [PlacementError, lambda text: EngineError("ONNX Runtime did not take the model")])
def test_refused(error, device):
    raise error("refused")

@pytest.mark.parametrize("device", ["qnn"])
def test_wrong(device):
    WRONG
"""


@pytest.mark.parametrize(
    ("wrong", "allowed", "says", "code"),
    [
        ("pass", 2, "1 passed, 2 xfailed", pytest.ExitCode.OK),
        ("pass", 1, "its data allows 1", pytest.ExitCode.TESTS_FAILED),
        ("assert 0", 2, "1 failed, 2 xfailed", pytest.ExitCode.TESTS_FAILED),
    ],
)
def test_late_refusals_are_counted_and_no_wrong_result_is_one(tmp_path, wrong, allowed, says, code):
    """A device may refuse late as often as its data says; every other failure counts as ever."""
    conftest = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    conftest += f"\nlate_refusals = {{'qnn': {allowed}}}.__getitem__\n"
    (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
    (tmp_path / "test_small.py").write_text(LATE.replace("WRONG", wrong), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=BARE, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code
    assert says in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_every_known_failure_has_a_reason_and_names_tests(kind):
    """What a device is excused from says why, and names tests that exist."""
    assert Device(kind).kind == kind
    assert device_facts.bound(Device(kind)) > 0
    for known in device_facts.known_failures(kind):
        assert known.reason
        assert known.tests
        for name in known.tests:
            path, _, test = name.partition("::")
            source = (ROOT / path).read_text(encoding="utf-8")
            assert f"def {test.partition('[')[0]}(" in source


def test_a_star_stands_for_any_text_and_brackets_for_themselves():
    """The parameters of a test stand in brackets, which other patterns would read as a set of letters."""
    known = KnownFailure("why", ("t.py::test_op[cuda-*-f16]",))
    assert known.lists("t.py::test_op[cuda-pow-f16]")
    assert not known.lists("t.py::test_op[cuda-pow-f32]")
    assert not known.lists("t.py::test_opc")


def test_an_entry_may_be_for_a_package():
    """An engine that comes in two builds has failures of each."""
    assert KnownFailure("why", ("t.py::test",), package="numpy").applies
    assert not KnownFailure("why", ("t.py::test",), package="no-such-package").applies
