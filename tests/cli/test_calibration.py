"""`calibrate`, `bench` and `report --why`: measured, shown, and explained."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from command_line import Cli
from onnx import parser

from rlx_ort import Device, calibrate, environment
from rlx_ort.calibration import store
from rlx_ort.providers.base import CostProfile
from rlx_ort.selection import candidates

DET = """
<ir_version: 8, opset_import: ["": 18]>
det (float[rows, 2, 2] x) => (float[rows] y) { a = Add (x, x)  y = Det (a) }
"""


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    store.forget()


def test_calibrate_measures_and_show_tells_what_is_stored(cli: Cli) -> None:
    """What `--show` prints is the profile that was just measured."""
    measured = cli("calibrate", "--device", "cpu", "--quick", "--json").document["devices"]
    shown = cli("calibrate", "--device", "cpu", "--show", "--json").document["devices"]
    assert measured == shown
    assert measured[0]["profile"]["quick"] is True
    assert measured[0]["gemm_gflops"] > 0


def test_a_calibration_that_cannot_be_kept_fails(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 9, after what was measured, since nothing of it is left when the command has ended."""
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("RLX_CACHE_DIR", str(blocked))
    outcome = cli("calibrate", "--device", "cpu", "--quick", "--json")
    assert outcome.code == 9
    assert outcome.document["devices"][0]["gemm_gflops"] > 0
    assert f"cannot be written to {blocked}" in outcome.err


def test_show_without_a_calibration_says_how_to_get_one(cli: Cli) -> None:
    """Nothing is measured, and the command that does is named."""
    outcome = cli("calibrate", "--device", "cpu", "--show")
    assert outcome.code == 0
    assert "rlx-ort calibrate" in outcome.err


def test_calibrating_a_device_that_is_not_here_fails_with_its_own_exit_code(cli: Cli) -> None:
    """Exit code 6: a device could not be measured."""
    outcome = cli("calibrate", "--device", "tpu")
    assert outcome.code == 6
    assert "cannot be calibrated" in outcome.err
    assert "run `rlx-ort calibrate`" not in outcome.err  # it just did


def test_calibrating_for_a_model_measures_what_its_operators_need(cli: Cli, tmp_path: Path) -> None:
    """A profile is made where there is none; a model with the same needs adds nothing to it."""
    model = tmp_path / "det.onnx"
    onnx.save(parser.parse_model(DET), model)
    asked = ("calibrate", model, "--device", "cpu", "--dim", "rows=400", "--quick", "--json")
    [first] = cli(*asked).document["devices"]
    kernels = [row[0] for row in first["profile"]["rows"]]
    assert first["reason"] == ""
    assert {"run", "launch", "MatMul", "Add"} <= set(kernels)
    assert [name for name in kernels if name.startswith("?Det")]
    [second] = cli(*asked).document["devices"]
    assert second == first


def test_why_says_how_each_part_is_known(cli: Cli, tmp_path: Path) -> None:
    """An operator that the table lacks is assumed, and measured once it was calibrated for."""
    model = tmp_path / "det.onnx"
    onnx.save(parser.parse_model(DET), model)
    cli("calibrate", "--device", "cpu", "--quick")

    def how() -> str:
        [row] = cli("report", model, "--only", "cpu", "--dim", "rows=400", "--why", "--json").document["devices"]
        return str(next(term["how"] for term in row["terms"] if term["kind"] == "Det"))

    assert how() == "assumed"
    cli("calibrate", model, "--device", "cpu", "--dim", "rows=400")
    assert how() == "measured"
    assert "how it is known" in cli("report", model, "--only", "cpu", "--why").out


def test_bench_tells_percentiles_and_the_prediction(cli: Cli, classifier: Path) -> None:
    """The percentiles are in order, and the model ran as often as was asked."""
    outcome = cli("bench", classifier, "--devices", "cpu", "--runs", "5", "--shape", "ids=2,6", "--json")
    [row] = outcome.document["devices"]
    assert 0 < row["p50_ns"] <= row["p90_ns"] <= row["p99_ns"]
    assert row["predicted_ns"] > 0
    assert outcome.document["dims"] == {"batch": 2, "tokens": 6}


def test_bench_shows_why_a_device_has_no_time(cli: Cli, add_one: Path) -> None:
    """A device that is not here is a row with the reason."""
    rows = cli("bench", add_one, "--devices", "cpu,tpu", "--runs", "2", "--json").document["devices"]
    assert [row["device"] for row in rows] == ["cpu", "tpu"]
    assert rows[1]["p50_ns"] is None
    assert rows[1]["failure"]


def test_bench_opens_no_denied_device(cli: Cli, add_one: Path) -> None:
    """RLX_DENY_DEVICES wins over --devices."""
    with environment.override({"RLX_DENY_DEVICES": "cpu"}):
        [row] = cli("bench", add_one, "--devices", "cpu", "--runs", "2", "--json").document["devices"]
    assert row["p50_ns"] is None
    assert "deny: cpu" in row["failure"]


def test_why_splits_each_prediction_into_parts(cli: Cli, classifier: Path) -> None:
    """The parts add up to the prediction."""
    rows = cli("report", classifier, "--only", "cpu", "--dim", "batch=2", "--dim", "tokens=6", "--why", "--json")
    [row] = rows.document["devices"]
    assert sum(term["ns"] for term in row["terms"]) == pytest.approx(row["predicted_ns"])
    assert row["assumed_dims"] == []
    assert "rlx-ort calibrate" in row["uncalibrated"]


def test_why_says_what_was_chosen(cli: Cli, classifier: Path) -> None:
    """For people: the choice and its time."""
    outcome = cli("report", classifier, "--only", "cpu", "--why")
    assert "chosen: cpu" in outcome.out
    assert "no other device may run it" in outcome.out


@pytest.mark.parametrize("why", [(), ("--why",)])
def test_a_report_says_which_sizes_were_assumed(cli: Cli, classifier: Path, why: tuple[str, ...]) -> None:
    """Wherever a prediction is shown, for people and in JSON; a dim that was given is not among them."""
    outcome = cli("report", classifier, "--only", "cpu", "--dim", "batch=2", *why)
    assert "predicted with tokens=8;" in outcome.err
    [row] = cli("report", classifier, "--only", "cpu", "--dim", "batch=2", "--json", *why).document["devices"]
    assert row["assumed_dims"] == ["tokens"]


def test_a_bench_says_which_sizes_it_made_up(cli: Cli, classifier: Path) -> None:
    """A dim without a size is run and predicted with the size that every command assumes."""
    outcome = cli("bench", classifier, "--devices", "cpu", "--runs", "1", "--dim", "batch=2")
    assert "tokens=8" in outcome.err
    assert "batch=2" not in outcome.err


def test_why_says_that_a_profile_is_of_another_version(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """The prediction falls back to the default profile, and the difference is named."""
    profile = calibrate("cpu", quick=True)
    old = replace(profile, key=replace(profile.key, engine="onnxruntime 1.0.0"))
    store.forget()
    [kept] = (tmp_path / "calibration").glob("*.json")
    kept.unlink()
    (kept.parent / old.key.file_name).write_text(old.to_json(), encoding="utf-8")
    [row] = cli("report", add_one, "--only", "cpu", "--why", "--json").document["devices"]
    assert row["profile_source"].startswith("default")
    assert "'onnxruntime 1.0.0' there" in row["uncalibrated"]


@pytest.mark.webgpu
def test_why_names_the_preference_that_decided(cli: Cli, add_one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preferred device within 5 % of the best says so; the best is named."""
    from rlx_ort.selection import predict
    from rlx_ort.selection.cost import ProfileCostModel

    figures = CostProfile(1.0, 1.0, 1.0, 0.0, 100_000.0, 0.0, 0.0)
    slower = replace(figures, roundtrip_ns=103_000.0)
    models = {"cpu": figures, "webgpu": slower}
    known = {label: ProfileCostModel(Device(label), profile) for label, profile in models.items()}
    for module in (predict, candidates):
        monkeypatch.setattr(module, "cost_model", lambda device: known.get(device.label))
    outcome = cli("report", add_one, "--only", "cpu,webgpu", "--prefer", "webgpu", "--why")
    assert "chosen: webgpu" in outcome.out
    assert "prefer: webgpu" in outcome.out
    assert "behind cpu" in outcome.out


@pytest.mark.webgpu
def test_a_bench_lets_the_cpu_help_unless_the_devices_are_named(cli: Cli, tmp_path: Path) -> None:
    """Det has no WebGPU kernel: a row with a time by default, a failure when the device is named."""
    model = tmp_path / "det.onnx"
    onnx.save(parser.parse_model(DET), model)
    with environment.override({"RLX_DEVICES": "webgpu"}):
        [helped] = cli("bench", model, "--runs", "1", "--json").document["devices"]
    [named] = cli("bench", model, "--devices", "webgpu", "--runs", "1", "--json").document["devices"]
    assert helped["p50_ns"] > 0
    assert 0 < helped["placement_share"] < 1
    assert named["p50_ns"] is None
    assert "would not run on WebGPU" in named["failure"]


def test_a_picture_is_drawn(cli: Cli, classifier: Path, tmp_path: Path) -> None:
    """A file of the format its suffix names, and nothing else beside it."""
    pytest.importorskip("matplotlib")
    folder = tmp_path / "pictures"
    folder.mkdir()
    path = folder / "picture.png"
    outcome = cli("bench", classifier, "--devices", "cpu", "--runs", "2", "--plot", path)
    assert outcome.code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(folder.iterdir()) == [path]


def test_a_picture_has_a_panel_for_each_device_and_the_comparison(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """Its text, which an SVG keeps when asked to, names the device, units and what is compared."""
    matplotlib = pytest.importorskip("matplotlib")
    path = tmp_path / "picture.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert cli("bench", add_one, "--devices", "cpu", "--runs", "2", "--plot", path).code == 0
    text = path.read_text(encoding="utf-8")
    words = ("add_one.onnx (rows=2)", "cpu: ", "FLOP/byte", "GFLOP/s", "GB/s", "predicted against measured", "Add, ")
    assert [word for word in words if word not in text] == []


def test_a_report_draws_no_comparison(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """Nothing was measured."""
    matplotlib = pytest.importorskip("matplotlib")
    path = tmp_path / "picture.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert cli("report", add_one, "--only", "cpu", "--plot", path).code == 0
    assert "predicted against measured" not in path.read_text(encoding="utf-8")


def test_a_picture_of_an_unknown_format_is_refused(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """The formats are named, and no file is left."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.bmpx"
    cli("report", add_one, "--only", "cpu", "--plot", path).fails(1, "png")
    assert not path.exists()


def test_a_picture_without_matplotlib_names_the_extra(
    cli: Cli, add_one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that installs it is in the message."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    cli("bench", add_one, "--devices", "cpu", "--runs", "1", "--plot", tmp_path / "picture.png").fails(
        10, 'pip install ".[plot]"'
    )


def test_a_bench_with_faults_shows_what_each_one_costs(cli: Cli, add_one: Path) -> None:
    """A device that is alone cannot be replaced, so the row has the error."""
    rows = cli("bench", add_one, "--devices", "cpu", "--faults", "--runs", "3", "--json").document["faults"]
    assert [row["fault"] for row in rows] == ["driver error", "out of memory", "hang"]
    assert "CUDA failure 719" in rows[0]["failure"]
    assert "longer than 0.1 s" in rows[2]["failure"]
    assert all(row["plain_ns"] > 0 and row["resilient_ns"] > 0 for row in rows)
    assert "CUDA failure 719" in cli("bench", add_one, "--devices", "cpu", "--faults", "--runs", "1").out
