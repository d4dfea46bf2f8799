"""ONNX Runtime's own reader of model packages, since 1.32 in Python, reads the folders that are written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_packages.packages import X, make, reference

import rlx_ort
from rlx_ort import Graph, Precision
from rlx_ort.deploy.create import Recipe, create_package
from rlx_ort.providers.engine.runtime import onnxruntime

pytestmark = pytest.mark.skipif(
    not hasattr(onnxruntime(), "ModelPackage"), reason="this ONNX Runtime has no ModelPackage in Python"
)
STRICT = {"allow_external_paths": False, "follow_symlinks": False, "strict_unknown_fields": True}


def session_of(folder: Path) -> Any:
    """Return the session that ONNX Runtime opens for the CPU, with no settings but the package's."""
    engine = onnxruntime()
    options = engine.SessionOptions()
    options.add_provider("CPUExecutionProvider", {})
    chosen = engine.ModelPackageContext(str(folder)).select_component("model", engine.ModelPackageOptions(options))
    return chosen.create_session()


def test_the_strict_reader_finds_what_was_written(tmp_path: Path) -> None:
    """No unknown field, no path that leaves the folder; name, version and variants with their providers are ours."""
    folder = make(tmp_path / "a.ortpackage", folder=True, version="2.1")
    info = onnxruntime().ModelPackage.open(str(folder), **STRICT).get_info()
    assert (info["schema_version_major"], info["package_name"], info["package_version"]) == (1, "small", "2.1")
    (component,) = info["components"]
    assert component["name"] == "model"
    assert {row["name"]: (row["ep"], Path(row["variant_directory"])) for row in component["variants"]} == {
        "cpu-f32": ("CPUExecutionProvider", folder / "cpu-f32"),
        "cuda-f16": ("CUDAExecutionProvider", folder / "cuda-f16"),
    }


def test_shared_assets_have_the_names_that_onnx_runtime_computes(tmp_path: Path) -> None:
    """Its digest of the folder is the URI by which a variant names its weights, and resolves to that folder."""
    folder = make(tmp_path / "a.ortpackage", folder=True)
    package = onnxruntime().ModelPackage.open(str(folder), **STRICT)
    used = set()
    for variant in ("cpu-f32", "cuda-f16"):
        info = json.loads(package.get_variant_json("model", variant))["executor_info"]["ort"]
        (uri,) = info["session_options"].values()
        asset = Path(package.resolve_asset_uri(uri))
        assert package.compute_directory_hash(str(asset)) == uri
        used.add(asset)
    assert used == {*(folder / "shared_assets").iterdir()}


@pytest.mark.parametrize(
    ("variants", "tolerance"),
    [({"cpu": Precision.F32, "cuda": Precision.F16}, 1e-6), ({"cpu": Precision.F16}, 1e-2)],
    ids=["f32", "f16"],
)
def test_both_readers_give_the_same_outputs(tmp_path: Path, variants: dict[str, Precision], tolerance: float) -> None:
    """ONNX Runtime selects the CPU's variant by itself, and its session and ours agree with the reference."""
    folder = make(tmp_path / "a.ortpackage", folder=True, variants=variants)
    (theirs,) = session_of(folder).run(None, {"x": X})
    with rlx_ort.open_package(folder) as runner:
        (ours,) = runner.run("cpu", {"x": X})
    scale = np.max(np.abs(reference(X)))
    assert np.max(np.abs(theirs - reference(X))) / scale < tolerance
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=scale * min(tolerance, 1e-3))


def test_a_package_without_weights_is_read_too(tmp_path: Path) -> None:
    """Its variant has no shared asset and so no session option."""
    graph = Graph("plain")
    x = graph.input("x", ["rows", 4])
    graph.outputs = [graph.relu(x) * 2.0]
    folder = tmp_path / "plain.ortpackage"
    create_package(graph, folder, Recipe(variants={"cpu": Precision.F32}), folder=True)
    given = np.array([[-1.0, 0.5, 2.0, -0.0]], np.float32)
    (theirs,) = session_of(folder).run(None, {"x": given})
    np.testing.assert_array_equal(theirs, np.maximum(given, 0) * 2)
