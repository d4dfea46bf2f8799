"""Tuning on real devices: results stay right, and the winner is taken by later runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlx_ort import CompileOptions, Device, Graph, GraphDevices, tuning

SOURCE = np.random.default_rng(5)
X = {"x": SOURCE.normal(size=(4, 16)).astype(np.float32)}
W = SOURCE.normal(size=(16, 16)).astype(np.float32) / 4


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave no record to other tests, and race briefly."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_RACE_S", 0.05)


def layers() -> Graph:
    """Return two products with a gelu between them, for any number of rows."""
    graph = Graph("layers")
    x = graph.input("x", ["rows", 16])
    graph.outputs = [graph.gelu(x @ graph.param("w", data=W, shape=W.shape)) @ graph.param("v", data=W, shape=W.shape)]
    return graph


@pytest.mark.parametrize("precision", ["f32", "f16"])
def test_results_stay_within_the_tolerance(device: Device, precision: str) -> None:
    """Whichever variant wins; without one, options stay as they are."""
    exact = GraphDevices(layers()).run("cpu", X)[0]
    outcome = GraphDevices(layers(), options=CompileOptions(precision=precision)).tune(X, device, budget_s=20)
    tuned = GraphDevices(layers(), options=CompileOptions(precision=precision)).run(device, X)[0]
    assert outcome.error <= outcome.tolerance
    assert outcome.kept
    np.testing.assert_allclose(tuned, exact, atol=outcome.tolerance * float(np.abs(exact).max()))


def test_options_beyond_the_tolerance_are_replaced_by_exact_ones(device: Device) -> None:
    """The caller allows f16, and no error that f16 has."""
    options = CompileOptions(precision="f16", dims={"rows": len(X["x"])})  # else another session may run first
    outcome = GraphDevices(layers(), options=options).tune(X, device, tolerance=1e-5, budget_s=20)
    assert outcome.variant.changes["precision"] in {"f32", "tf32"}
    exact, tuned = GraphDevices(layers()).run("cpu", X)[0], GraphDevices(layers(), options=options).run(device, X)[0]
    np.testing.assert_allclose(tuned, exact, atol=1e-5 * float(np.abs(exact).max()))
