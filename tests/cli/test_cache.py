"""`rlx-ort cache`, `package warm` and `package export` as a user sees them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from sample_packages.packages import X, make, reference

from rlx_ort import Graph, load
from rlx_ort.deploy.create import create_package
from rlx_ort.providers.engine.compiled.store import default_store


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a package, with a compile cache of the test's own."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    return make(tmp_path / "small.ortpackage")


def test_an_empty_cache_is_listed_as_such(cli, package, tmp_path):
    """The folder does not have to exist."""
    outcome = cli("cache", "list")
    assert outcome.code == 0
    assert "the cache is empty" in outcome.err
    document = cli("cache", "list", "--json").document
    assert (document["entries"], document["total_bytes"]) == ([], 0)
    assert not (tmp_path / "cache").exists()


def test_warming_listing_explaining_and_clearing(cli, package):
    """What `warm` says it kept is what `list` shows, `explain` knows and `clear` deletes."""
    (row,) = cli("package", "warm", package, "--device", "cpu", "--json").document["devices"]
    assert (row["device"], row["problem"], row["starts"]) == ("cpu", "", True)
    listed = cli("cache", "list", "--json").document
    assert [(entry["key"], entry["bytes"]) for entry in listed["entries"]] == [(row["entry"], row["nbytes"])]
    assert row["entry"][:12] in cli("cache", "list").out
    assert cli("cache", "explain", package, "--json").document == {
        "schema": 1,
        "key": row["entry"],
        "cached": True,
        "nearest": None,
        "changed": [],
    }
    assert cli("cache", "clear", "--json").document["freed_bytes"] == row["nbytes"]
    assert [path.name for path in (default_store().root).iterdir()] == ["locks"]
    assert cli("cache", "explain", package, "--json").document["cached"] is False


def test_explain_says_what_changed(cli, package):
    """A dim that was bound since changes the model and the dims, and nothing else."""
    cli("package", "warm", package, "--device", "cpu")
    document = cli("cache", "explain", package, "--dim", "rows=3", "--json").document
    assert document["cached"] is False
    assert [row["part"] for row in document["changed"]] == ["dims", "model"]
    assert "rows" in cli("cache", "explain", package, "--dim", "rows=3").out


def test_explain_takes_the_first_digits_of_a_key(cli, package):
    """As `list` shows them."""
    (row,) = cli("package", "warm", package, "--device", "cpu", "--json").document["devices"]
    assert cli("cache", "explain", row["entry"][:8], "--json").document["key"] == row["entry"]
    cli("cache", "explain", "no-such-thing").fails(2, "neither a file nor a key")


def test_list_check_drops_what_is_damaged(cli, package, tmp_path):
    """Every byte is read, and the document says what was wrong."""
    (row,) = cli("package", "warm", package, "--device", "cpu", "--json").document["devices"]
    weights = tmp_path / "cache" / "compiled" / row["entry"] / "weights.bin"
    data = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    document = cli("cache", "list", "--check", "--json").document
    assert document["dropped"] == [{"key": row["entry"], "problem": "weights.bin was changed"}]
    assert document["entries"] == []


def test_warming_for_a_device_that_is_not_here_fails_and_says_why(cli, package):
    """The exit code is that of a device that cannot be used, and the reason is on stderr."""
    cli("package", "warm", package, "--device", "cuda:7").fails(3, "cuda:7")


def test_export_to_triton_and_back(cli, package, tmp_path):
    """The exported model gives the results of the package's."""
    document = cli("package", "export", package, tmp_path / "repository", "--format", "triton", "--json").document
    assert (document["format"], document["batched_along"]) == ("triton", "rows")
    model = Path(document["written"]) / "1" / "model.onnx"
    np.testing.assert_allclose(load(model).run("cpu", {"x": X})[0], reference(X), rtol=1e-3, atol=1e-3)


def test_export_to_triton_says_why_a_model_is_not_batched(cli, tmp_path):
    """The reason names the operator that mixes the rows; a flag stands in for the proof."""
    graph = Graph("centred")
    x = graph.input("x", ["rows", 4])
    graph.set_outputs([x - graph.mean(x, [0])], ["y"])
    create_package(graph, tmp_path / "centred.ortpackage")
    arguments = ("package", "export", tmp_path / "centred.ortpackage", tmp_path / "repository", "--format", "triton")
    outcome = cli(*arguments)
    assert "not batched: rows are not proved independent: ReduceMean" in outcome.err
    document = cli(*arguments, "--force", "--batch-unproven", "--json").document
    assert document["batched_along"] == "rows"


def test_export_to_onnx(cli, package, tmp_path):
    """A file that other tools read; what is there is replaced on request only."""
    arguments = ("package", "export", package, tmp_path / "out", "--format", "onnx", "--name", "net")
    assert cli(*arguments).code == 0
    onnx.checker.check_model(tmp_path / "out" / "net.onnx")
    assert cli(*arguments).code == 4
    assert cli(*arguments, "--force").code == 0


def test_a_damaged_package_is_not_exported(cli, tmp_path):
    """Every byte is checked before, and nothing is written."""
    folder = make(tmp_path / "small.ortpackage", folder=True)
    (weights,) = sorted(folder.glob("shared_assets/*/weights.bin"))[:1]
    data = weights.read_bytes()
    weights.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    outcome = cli("package", "export", folder, tmp_path / "out", "--format", "onnx")
    assert outcome.code == 7
    assert not (tmp_path / "out").exists()


def test_a_damaged_copy_that_runs_from_the_cache_says_so(cli, package, tmp_path):
    """The cache has its own weights, which `run` names; a damaged copy is refused, as `verify` does."""
    assert cli("package", "warm", package, "--device", "cpu").code == 0
    folder = tmp_path / "copy.ortpackage"
    assert cli("package", "extract", package, "-o", folder).code == 0
    document = cli("package", "run", folder, "--device", "cpu", "--json").document
    assert (document["device"], document["weights"]) == ("cpu", "compile cache")
    for weights in set(folder.rglob("*.bin")) - {folder / "golden" / "data.bin"}:
        weights.write_bytes(bytes(byte ^ 255 for byte in weights.read_bytes()))
    cli("package", "run", folder, "--device", "cpu").fails(7, "weights.bin")
    assert cli("package", "verify", folder).code == 7
