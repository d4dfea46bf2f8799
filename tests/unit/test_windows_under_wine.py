"""The script that runs the tests under Wine: what it says where it cannot, and how it gets past processes that end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from developer_scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
SUITE = """
import os
import pathlib
import time
import pytest

def test_passes():
    pass

def test_stands_still_once():
    marker = pathlib.Path(__file__).with_name("marker")
    if not marker.exists():
        marker.touch()
        time.sleep(600)

def test_ends_the_process():
    os._exit(3)

@pytest.mark.skip(reason="not here")
def test_is_skipped():
    pass

def test_fails():
    assert False
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the script is for Linux")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("windows_under_wine")


def _not_root(script: ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(script.os, "geteuid", lambda: 1000)


def _no_apt(script: ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(script.os, "geteuid", lambda: 0)
    patch.setattr(script.shutil, "which", lambda name: None)


def _no_mounts(script: ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(script.os, "geteuid", lambda: 0)
    patch.setattr(script.shutil, "which", lambda name: f"/usr/bin/{name}")
    patch.setattr(script, "debian", lambda: 12)
    denied = subprocess.CompletedProcess([], 1, "", "unshare failed: Operation not permitted")
    patch.setattr(script.subprocess, "run", lambda *given, **more: denied)


@pytest.mark.parametrize(
    ("lack", "said"),
    [(_not_root, "this is not root"), (_no_apt, "no apt-get"), (_no_mounts, "mount.*Operation not permitted")],
)
def test_what_is_missing_is_said_in_a_line(script: ModuleType, tmp_path, monkeypatch, lack, said) -> None:
    """Wine, root and the right to mount, each with what to do."""
    monkeypatch.setattr(script, "wine_version", lambda system: "wine-8.0 (Debian 8.0)")
    lack(script, monkeypatch)
    with pytest.raises(script.SetupError, match=said) as caught:
        script.set_up_system(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("at_most", [0, 2])
def test_a_test_that_ends_its_process_fails_and_the_others_run(script: ModuleType, tmp_path, monkeypatch, at_most):
    """Each test has one outcome, whichever process it had it in; one whose process stands still is tried again."""
    (tmp_path / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (tmp_path / "test_small.py").write_text(SUITE, encoding="utf-8")
    config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    monkeypatch.setattr(script, "OUT", str(tmp_path))

    class Here:
        """An environment that is this one."""

        def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
            given = [text.replace("\\", "/") for text in arguments]
            command = [sys.executable, *given, *config]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            return subprocess.CompletedProcess(command, self.process.wait())

        def stop(self) -> None:
            self.process.kill()

    monkeypatch.setattr(script, "STILL_S", 12)
    outcomes = tmp_path / "outcomes.jsonl"
    part = script.Part("cpu", at_most=at_most)
    script.run_pytest(Here(), part, [str(tmp_path / "test_small.py")], outcomes, 0.0)
    found = script.summary(outcomes)
    assert found["counts"] == {"passed": 2, "failed": 2, "skipped": 1, "xfailed": 0}
    failed = {each["test"].partition("::")[2]: each["why"] for each in found["failures"]}
    assert failed["test_ends_the_process"] == "ends the process"
    assert "assert False" in failed["test_fails"]
    assert found["skipped"] == {"not here": 1}


def test_cases_that_wine_cannot_run_are_not_judged(script: ModuleType, tmp_path: Path) -> None:
    """The others are: an answer that a strict run contradicts is a failure, and so is a choice that does not answer."""
    late = {"choice": [{"kind": "late refusal", "reason": "too late"}]}
    cases = [
        {"case": "a", "kind": "both yes"},
        {"case": "b", "kind": "false yes", "failure": "not there"},
        {"case": "c", "kind": "false yes", "failure": "a shader"},
        {"case": "d", "kind": "both no", **late},
        {"case": "e", "kind": "not imported"},
    ]
    (tmp_path / "truth.jsonl").write_text("\n".join(map(json.dumps, cases)), encoding="utf-8")
    (tmp_path / script.DXIL).write_text("c\n", encoding="utf-8")
    found = script.truth_summary(tmp_path)
    assert (found["cases"], found["agreement"]) == (5, 0.6667)
    assert [(each["test"], each["cause"], each["kind"]) for each in found["failures"]] == [
        ("b", "", "false yes"),
        ("c", "vkd3d", "false yes"),
        ("d", "", "the choice: late refusal"),
    ]


def test_a_model_that_is_wrong_or_not_reached_is_a_failure(script: ModuleType, tmp_path: Path) -> None:
    """Wine's shaders are told apart, and a script that wrote nothing reached none."""
    assert script.models_summary(tmp_path)["failures"] == [
        {"test": "models", "cause": "", "why": "all were not reached"}
    ]
    rows = {"bert": {"wrong": ["off by 1e-2"]}, "lstm": {"wrong": ["a shader"]}, "tree": {"wrong": []}}
    document = {"rows": rows, "not_reached": 0}
    (tmp_path / "models.json").write_text(json.dumps(document), encoding="utf-8")
    (tmp_path / script.DXIL).write_text("lstm\n", encoding="utf-8")
    causes = {each["test"]: each["cause"] for each in script.models_summary(tmp_path)["failures"]}
    assert causes == {"bert": "", "lstm": "vkd3d"}
