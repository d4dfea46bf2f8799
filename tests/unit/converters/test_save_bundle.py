"""Writing bundles: from file to file without reading whole weights, and what happens when files change meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import pytest
from sample_models.source_files import LARGE, model_with_bodies, small_graph

from rlx_ort.converters.bundle import bundle_from_graph, bundle_of
from rlx_ort.converters.files import save_bundle, save_onnx, written_files
from rlx_ort.converters.sources import open_source
from rlx_ort.errors import ConversionError


@pytest.mark.parametrize("external", [False, True])
def test_a_file_that_is_opened_and_saved_again_is_the_same(tmp_path: Path, external: bool) -> None:
    """Byte for byte, wherever the weights are."""
    source = tmp_path / "a" / "model.onnx"
    target = tmp_path / "b" / "model.onnx"
    for path in (source, target):
        path.parent.mkdir()
    save_onnx(small_graph(), source, external_data=external)
    save_bundle(open_source(source), target, external_data=external)
    for path in source.parent.iterdir():
        assert (target.parent / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("external", [False, True])
def test_weights_of_bodies_are_written_too(tmp_path: Path, external: bool) -> None:
    """Onnx's own loader finds the weight of each branch."""
    path = tmp_path / "model.onnx"
    save_bundle(bundle_of(model_with_bodies()), path, external_data=external)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    found = [onnx.numpy_helper.to_array(attribute.g.initializer[0]) for attribute in model.graph.node[0].attribute]
    assert sorted(float(values[0, 0]) for values in found) == [0.0, 1.0]
    assert all(values.shape == LARGE.shape for values in found)


def test_progress_counts_every_byte_of_the_weights(tmp_path: Path) -> None:
    """A progress bar with a known total ends full."""
    bundle = bundle_from_graph(small_graph())
    written: list[int] = []
    save_bundle(bundle, tmp_path / "model.onnx", progress=written.append)
    assert sum(written) == sum(data.nbytes for data in bundle.weights.values())


def test_the_files_that_will_be_written_are_known_before(tmp_path: Path) -> None:
    """So that a caller can ask before it overwrites."""
    bundle = bundle_from_graph(small_graph())
    path = tmp_path / "model.onnx"
    assert written_files(bundle, path) == (path,)
    assert written_files(bundle, path, external_data=True) == (path, tmp_path / "model.onnx.data")


def test_a_source_that_was_written_to_is_refused(tmp_path: Path) -> None:
    """Its map may be shorter than it was; reading on would end the process."""
    source = tmp_path / "model.onnx"
    save_onnx(small_graph(), source)
    bundle = open_source(source)
    with source.open("r+b") as file:
        file.seek(300)
        file.write(b"changed")
    os.utime(source, ns=(0, 0))
    with pytest.raises(ConversionError, match="was written to since"):
        save_bundle(bundle, tmp_path / "out.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
