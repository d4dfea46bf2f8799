"""The record of the GPU gate belongs to the code that it is about."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import onnx.parser
import pytest
from developer_scripts import load_script

import rlx_ort

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "results" / "gpu-gate.json"


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    return load_script("gpu_gate")


def test_the_record_is_of_the_capability_data_and_the_lowerings_as_they_are(gate: ModuleType) -> None:
    """Other models, verdicts or sessions for CUDA need another run of scripts/gpu_gate.py, which a GPU can do."""
    if not rlx_ort.is_available("cuda"):
        pytest.skip("only a machine with CUDA can make the record again; `scripts/gpu_covered.py` compares it")
    assert json.loads(RECORD.read_text(encoding="utf-8"))["covered"] == gate.covered_digest()


def test_the_record_is_of_a_run_that_passed(gate: ModuleType) -> None:
    """Every part ran, nothing failed that is not known, and the device is one that CI does not have."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert record["device"] == "cuda"
    assert record["machine"]["available"] == "True"
    assert record["suite"]["failures"] == []
    assert [part for part in ("suite", "truth", "webgpu") if not record[part]["ok"]] == []
    assert record["calibration"]["ok"] is not False  # None, with the reason beside it, where it did not run alone


@pytest.fixture
def call(gate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return a call of the gate on a machine where every part passes at once."""
    monkeypatch.setattr(gate, "machine", lambda device: {"hardware": "H", "onnxruntime": "1"})
    monkeypatch.setattr(gate, "covered_digest", lambda: "as it is")  # takes ten seconds
    for name in ("suite", "truth", "figures", "models"):
        monkeypatch.setattr(gate, name, lambda *given, **more: {"ok": True, "limit_s": given[-1]})

    def run(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", ["gpu_gate.py", "--out", str(tmp_path), *arguments])
        assert gate.main() == 0
        found: dict[str, Any] = json.loads((tmp_path / "gpu-gate.json").read_text(encoding="utf-8"))
        return found

    return run


def test_parts_of_two_calls_make_one_record(call: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """A command on a GPU machine may last too short for all parts."""
    call("--commit", "a", "--parts", "suite")
    found = call("--commit", "a", "--parts", "webgpu,calibration", "--record", str(tmp_path / "gpu-gate.json"))
    assert {"suite", "webgpu", "calibration"} <= found.keys()
    assert "figures" not in found


def test_parts_of_two_commits_say_which(call: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """A part is not run again for a change that what it is about does not show."""
    call("--commit", "a", "--parts", "suite,figures")
    found = call("--commit", "b", "--parts", "suite", "--record", str(tmp_path / "gpu-gate.json"))
    assert (found["commit"], found["suite"]["commit"], found["figures"]["commit"]) == ("b", "b", "a")


def test_parts_about_two_states_of_the_code_make_no_record(
    gate: ModuleType, call: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models that CUDA gets, the verdicts and the sessions must be the same."""
    call("--commit", "a", "--parts", "suite")
    monkeypatch.setattr(gate, "covered_digest", lambda: "another")
    with pytest.raises(SystemExit):
        call("--commit", "b", "--parts", "figures", "--record", str(tmp_path / "gpu-gate.json"))


def test_the_digest_may_come_from_elsewhere(
    gate: ModuleType, call: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same on any machine, so time on a GPU machine need not go into it."""
    monkeypatch.setattr(gate, "covered_digest", lambda: pytest.fail("it is given"))
    assert call("--commit", "a", "--parts", "suite", "--covered", "abc")["covered"] == "abc"


def test_a_part_that_fails_leaves_the_record_of_those_before(
    gate: ModuleType, call: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is written after each part."""

    def cut(*given: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(gate, "figures", cut)
    with pytest.raises(KeyboardInterrupt):
        call("--commit", "a")
    found = json.loads((tmp_path / "gpu-gate.json").read_text(encoding="utf-8"))
    assert {"suite", "truth", "webgpu"} <= found.keys()


def test_all_parts_together_take_at_most_nine_minutes(gate: ModuleType, call: Callable[..., dict[str, Any]]) -> None:
    """The truth of the device runs beside the suite, users' models have a call of their own; a limit can be given."""
    assert sum(limit for part, limit in gate.LIMITS_S.items() if part not in ("truth", *gate.NAMED)) <= 540
    assert gate.LIMITS_S["truth"] <= gate.LIMITS_S["suite"]
    assert call("--commit", "a", "--limits", "webgpu=7")["webgpu"]["limit_s"] == 7


def test_what_a_stopped_program_printed_is_kept(gate: ModuleType) -> None:
    """Figures that were measured before the limit count."""
    code, out, err = gate._run(["-c", "import time; print('one', flush=True); time.sleep(60)"], 2.0)
    assert (code, out.strip()) == (-1, "one")
    assert "stopped after 2 s" in err


MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[2] x, float[2] y) => (float[2] z)
<float[2] w = {1, 2}>
{ a = Add(x, w)  b = Mul(y, y)  z = Pad<mode="wrap">(a, b) }
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("a = Add(x, w)  b = Mul(y, y)", "b = Mul(y, y)  a = Add(x, w)", True),
        ("(a, b)", "(other, b)", True),
        ("(y, y)", "(y, x)", False),
        ("{1, 2}", "{1, 3}", False),
        ('"wrap"', '"edge"', False),
        ("float[2] z", "float[3] z", True),
        ('"" : 21', '"" : 22', False),
    ],
)
def test_a_model_is_known_by_what_it_computes(gate: ModuleType, old: str, new: str, same: bool) -> None:
    """The order of nodes and the names of values do not count; operands, weights, attributes and versions do."""
    covered = load_script("gpu_covered")
    text = MODEL.replace(old, new)
    if new == "(other, b)":
        text = text.replace("a = Add", "other = Add")
    one, other = (onnx.parser.parse_model(each) for each in (MODEL, text))
    assert (covered._model(one) == covered._model(other)) is same


def test_the_capability_page_and_the_readme_are_made_from_the_records() -> None:
    """scripts/capability_page.py was run after the last record."""
    written = load_script("capability_page")
    assert written.PAGE.read_text(encoding="utf-8") == written.page()
    assert written.readme_row() in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def test_a_failure_in_the_record_names_no_folder_of_the_machine(gate: ModuleType) -> None:
    """The record is committed; paths within the project stay."""
    text = "/usr/lib/python3.12/subprocess.py:550 at tests/backend/ops/test_moe.py, usr/bin/x"
    assert gate._ABSOLUTE.sub("", text) == "subprocess.py:550 at tests/backend/ops/test_moe.py, x"


def test_models_of_users_take_at_most_four_minutes(gate: ModuleType, call: Callable[..., dict[str, Any]]) -> None:
    """They are a part that is run only if it is named."""
    assert "models" not in call("--commit", "a")
    assert call("--commit", "a", "--parts", "models")["models"]["limit_s"] <= 240
