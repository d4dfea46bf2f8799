"""Making packages: whole or not at all, and what a package cannot hold is said before anything is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_packages.packages import X, files_of, golden, make, make_graph

from rlx_ort import Graph, PackageError, Precision
from rlx_ort.deploy.create import create_package
from rlx_ort.deploy.package import Package
from rlx_ort.deploy.write import Content, write_package

TEXT = np.array(["a"], dtype=object)


def test_an_existing_package_is_left_alone(tmp_path: Path) -> None:
    """Without force nothing is replaced, and a folder never is."""
    file, folder = make(tmp_path / "a.ortpackage"), make(tmp_path / "b.ortpackage", folder=True)
    before = file.read_bytes()
    with pytest.raises(PackageError, match="exists"):
        create_package(make_graph(1), file)
    with pytest.raises(PackageError, match="exists"):
        create_package(make_graph(1), folder, folder=True, overwrite=True)
    assert file.read_bytes() == before


def test_a_failure_leaves_the_old_package_and_no_other_file(tmp_path: Path) -> None:
    """A source that changes while it is packed is found by its sum, and the old package stays."""
    target = make(tmp_path / "a.ortpackage")
    before = target.read_bytes()
    with pytest.raises(PackageError, match=r"graph\.json changed"):
        write_package(target, {"graph.json": Content(2, 0, lambda: (b"{}",))}, folder=False, overwrite=True)
    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_that_cannot_be_written_is_a_package_error(tmp_path: Path) -> None:
    """A target below something that is no folder is an error with the path."""
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(PackageError, match=r"a\.ortpackage"):
        make(tmp_path / "file" / "a.ortpackage")


def test_a_parameter_without_data_is_named(tmp_path: Path) -> None:
    """A model that could not run is not packed."""
    graph = Graph("unset")
    graph.outputs = [graph.input("x", [2, 2]) @ graph.param("w", [2, 2])]
    with pytest.raises(PackageError, match="without data: w"):
        create_package(graph, tmp_path / "a.ortpackage")


def test_a_precision_comes_before_that_of_a_variant_with_the_model_s_own_weights(tmp_path: Path) -> None:
    """`precisions` decides how a device runs, and the variant's ONNX model stays for other readers."""
    variants, precisions = {"cpu": Precision.F32}, {"cpu": Precision.F16}
    path = make(tmp_path / "a.ortpackage", variants=variants, precisions=precisions)
    with Package(path) as package:
        assert [(item.device, item.precision) for item in package.index.variants.values()] == [("cpu", Precision.F16)]
    assert "cpu-f32/model.onnx" in files_of(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"golden": [], "verify_on_first_use": True}, "golden cases", id="a check of nothing"),
        pytest.param({"requires": {"magic": "1"}}, "magic", id="an unknown requirement"),
        pytest.param({"requires": {"onnxruntime": "newest"}}, "newest", id="no version"),
        pytest.param({"tolerances": {"f31": 0.1}}, "f31", id="no precision"),
        pytest.param({"golden": [(golden()[0], {})]}, "the outputs none, and the model gives", id="nothing to compare"),
        pytest.param({"golden": [(golden()[0], {"z": X})]}, "the outputs z, and the model gives", id="no output"),
        pytest.param({"golden": [({"y": X}, golden()[1])]}, "the inputs y, and the model takes x", id="no input"),
        pytest.param({"golden": [({"x": TEXT}, golden()[1])]}, "golden/0/in/x", id="texts, which a data file has not"),
        pytest.param({"tolerances": {"f32": float("nan")}}, "nan", id="no number"),
        pytest.param({"variants": {"tpu": Precision.F32}}, "TPU", id="a device without an execution provider"),
        pytest.param(
            {"variants": {"cuda": Precision.F16}, "precisions": {"cuda": Precision.BF16}},
            "weights in f16 and is to run in bf16",
            id="weights that nothing could use",
        ),
    ],
)
def test_a_recipe_that_would_be_dropped_or_never_open_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Nothing is written, and the message names the entry."""
    with pytest.raises(PackageError, match=message):
        make(tmp_path / "a.ortpackage", **changes)
    assert list(tmp_path.iterdir()) == []


def test_weights_are_stored_once_for_variants_that_share_them(tmp_path: Path) -> None:
    """Two variants in f32 have one data file, and a third one in f16 has its own of half the size."""
    variants = {"cpu": Precision.F32, "cuda": Precision.F32, "webgpu": Precision.F16}
    files = files_of(make(tmp_path / "a.ortpackage", variants=variants))
    sizes = sorted(len(data) for name, data in files.items() if name.startswith("shared_assets/"))
    assert sizes == [2 * 32 * 32 * 2, 2 * 32 * 32 * 4]


def test_opening_loads_no_engine(tmp_path: Path) -> None:
    """A package is opened, checked and read without ONNX Runtime or ONNX."""
    path = make(tmp_path / "a.ortpackage")
    program = (
        "import sys\nfrom rlx_ort.deploy.package import Package\n"
        f"package = Package({str(path)!r})\npackage.check_all()\npackage.graph()\n"
        "print(*(name for name in ('onnxruntime', 'onnx', 'rich', 'model_signing') if name in sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=True
    )
    assert result.stdout.strip() == ""
