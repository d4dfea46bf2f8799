"""A package carries a plan for machines whose devices have its budgets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlx_ort import Device, Graph, InputError, open_package, start_package, warm_package
from rlx_ort.deploy.create import Recipe, create_package
from rlx_ort.options.split_plan import SplitPlan, Stage

X = {"x": np.arange(4, dtype=np.float32)}


def graph() -> Graph:
    """Return `-exp(x)`."""
    made = Graph("two")
    made.outputs = [made.neg(made.exp(made.input("x", [4]), name="first"), name="second")]
    return made


def packed(folder: Path, *devices: str, last: str = "first", budget: int = 1 << 20) -> Path:
    """Return a package with a plan of two stages."""
    stages = tuple(Stage(Device(device), name) for device, name in zip(devices, (last, "second"), strict=True))
    plan = SplitPlan(stages, tuple((Device(device), budget) for device in dict.fromkeys(devices)))
    create_package(graph(), folder / "two.ortpackage", Recipe(split=plan))
    return folder / "two.ortpackage"


def test_it_runs_by_its_plan(tmp_path: Path) -> None:
    """Also once it was warmed, which keeps one session of the whole graph."""
    path = packed(tmp_path, "cpu", "cpu", budget=1 << 33)
    with open_package(path) as runner:
        outputs = runner.run_fastest(X)
    np.testing.assert_allclose(outputs[0], -np.exp(X["x"]), rtol=1e-6)
    assert len(outputs.placement.stages) == 2
    warm_package(path, ["cpu"])
    with start_package(path) as started:
        np.testing.assert_allclose(started.run(X)[0], -np.exp(X["x"]), rtol=1e-6)
        assert not started.quick


@pytest.mark.parametrize(("devices", "budget"), [(("cpu", "tpu"), 1), (("cpu", "cpu"), 1 << 60)])
def test_elsewhere_it_runs_as_usual_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, devices: tuple[str, str], budget: int
) -> None:
    """A device is not here, or has less memory."""
    with open_package(packed(tmp_path, *devices, budget=budget)) as runner:
        outputs = runner.run_fastest(X)
    np.testing.assert_allclose(outputs[0], -np.exp(X["x"]), rtol=1e-6)
    assert not hasattr(outputs.placement, "stages")
    assert "its plan is not used" in caplog.text


def test_the_plan_of_another_graph_is_not_packed(tmp_path: Path) -> None:
    """The error is that of its use."""
    with pytest.raises(InputError, match="no node 'third'"):
        packed(tmp_path, "cpu", "cpu", last="third")
    assert not list(tmp_path.iterdir())
