"""`split` plans without opening anything, and `run --split` runs by the plan."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import Cli

from rlx_ort import Graph, save_onnx

SHAPE = (64, 64)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model of three products."""
    graph = Graph("layers")
    value = graph.input("x", ["rows", 64])
    for number in range(3):
        weight = graph.param(f"w{number}", data=np.full(SHAPE, 0.01, np.float32), shape=SHAPE)
        value = graph.matmul(value, weight, name=f"layer{number}")
    graph.outputs = [value]
    save_onnx(graph, tmp_path / "layers.onnx")
    return tmp_path / "layers.onnx"


def test_the_table_has_the_stages_within_their_budgets(cli: Cli, model: Path) -> None:
    """And what devices would take alone; the devices need not be here."""
    outcome = cli("split", model, "--budget", "cuda=40GB,cpu=40GB")
    assert outcome.code == 0, outcome.err
    assert "of 40 GiB" in outcome.out
    assert "cpu alone" in outcome.out
    assert "rows=" in outcome.err


def test_a_plan_is_written_and_run(cli: Cli, model: Path, tmp_path: Path) -> None:
    """After it was edited, too."""
    out = tmp_path / "plan.json"
    document = cli("split", model, "--budget", "cpu=1GB", "--out", out, "--json").document
    plan = json.loads(out.read_text(encoding="utf-8"))
    assert plan == document["plan"]
    (last,) = plan["stages"]
    plan["stages"] = [{"device": "cpu", "last": "layer0"}, {"device": "cpu", "last": last["last"]}]
    out.write_text(json.dumps(plan), encoding="utf-8")
    ran = cli("run", model, "--split", out, "--json")
    assert ran.code == 0, ran.err
    assert ran.document["devices"] == ["cpu"]
    whole = cli("run", model, "--device", "cpu", "--json")
    assert ran.document["outputs"][0]["first"] == pytest.approx(whole.document["outputs"][0]["first"], rel=1e-5)


def test_a_budget_that_is_too_small_is_an_error_of_the_run(cli: Cli, model: Path) -> None:
    """With what is missing."""
    outcome = cli("split", model, "--budget", "cpu=10KB")
    assert outcome.code == 5
    assert "are missing" in outcome.err


def test_a_plan_that_is_none_is_an_error(cli: Cli, model: Path, tmp_path: Path) -> None:
    """A file that is not there as well."""
    (tmp_path / "plan.json").write_text('{"stages": 3}', encoding="utf-8")
    assert "a list" in cli("run", model, "--split", tmp_path / "plan.json").err
    missing = cli("run", model, "--split", tmp_path / "no.json")
    assert missing.code == 5
    assert "rlx-ort split --out" in missing.err


def test_a_split_names_its_devices_itself(cli: Cli, model: Path) -> None:
    """Another option that does is wrong usage."""
    assert cli("run", model, "--split", "auto", "--device", "cpu").code == 2


def test_auto_runs_whole_what_fits(cli: Cli, model: Path) -> None:
    """Nothing is cut without need."""
    outcome = cli("run", model, "--split", "auto", "--json")
    assert outcome.code == 0, outcome.err
    assert len(outcome.document["devices"]) == 1
