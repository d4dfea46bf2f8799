"""`calibrate`, `bench` and `report --why`: measured, shown, and explained."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Cli

from rlx_ort.calibration import store


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


@pytest.mark.parametrize("text", ["ids", "ids=a,b", "=2,6"])
def test_a_malformed_shape_is_wrong_usage(cli: Cli, classifier: Path, text: str) -> None:
    """--shape takes NAME=SIZES and nothing else."""
    assert cli("bench", classifier, "--shape", text).code == 2


@pytest.mark.parametrize("text", ["nobody=2,6", "ids=2,6,1"])
def test_a_shape_that_fits_no_input_is_wrong_usage(cli: Cli, classifier: Path, text: str) -> None:
    """The message says what the inputs are."""
    outcome = cli("bench", classifier, "--devices", "cpu", "--shape", text)
    assert outcome.code == 2
    assert "ids" in outcome.err


def test_why_splits_each_prediction_into_parts(cli: Cli, classifier: Path) -> None:
    """The parts add up to the prediction."""
    rows = cli("report", classifier, "--only", "cpu", "--dim", "batch=2", "--dim", "tokens=6", "--why", "--json")
    [row] = rows.document["devices"]
    assert sum(term["ns"] for term in row["terms"]) == pytest.approx(row["predicted_ns"])
    assert row["assumed_dims"] == []
    assert "rlx-ort calibrate" in row["uncalibrated"]


def test_why_says_which_sizes_were_assumed_and_what_was_chosen(cli: Cli, classifier: Path) -> None:
    """For people: the choice, its time, and the dims that were guessed."""
    outcome = cli("report", classifier, "--only", "cpu", "--why")
    assert "chosen: cpu" in outcome.out
    assert "batch, tokens" in outcome.err


def test_a_picture_is_drawn(cli: Cli, classifier: Path, tmp_path: Path) -> None:
    """A file of the format its suffix names."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    outcome = cli("bench", classifier, "--devices", "cpu", "--runs", "2", "--plot", path)
    assert outcome.code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_names_the_extra(
    cli: Cli, add_one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that installs it is in the message."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    outcome = cli("bench", add_one, "--devices", "cpu", "--runs", "1", "--plot", tmp_path / "picture.png")
    assert outcome.code == 1
    assert "rlx_ort[plot]" in outcome.err
