"""From PyTorch to ONNX to JSON to ONNX, in f16 and quantised: the outputs are still those of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx_ort.conversion.convert import ConversionReport, ConvertOptions, convert
from rlx_ort.converters.bundle import ModelBundle
from rlx_ort.parity.compare import reference_run
from rlx_ort.parity.metrics import Difference, difference
from rlx_ort.parity.opening import as_model

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch's exporter needs onnxscript")

NAMES = ("encoder", "decoder", "convnet")


class Exported:
    """A PyTorch module as a bundle, with an input and the output of torch for it, in float32."""

    def __init__(self, name: str) -> None:
        import torch
        from sample_models.torch_modules import MODELS

        from rlx_ort.converters.sources import from_torch

        module, args = MODELS[name]()
        self.bundle: ModelBundle = from_torch(module, args)
        self.inputs = {next(iter(self.bundle.input_types())): args[0].numpy()}
        with torch.no_grad():
            self.expected: np.ndarray[Any, Any] = module(*args).numpy()

    def error_of(self, path: Path) -> Difference:
        """Return how far a file's answer is from torch's."""
        [(_, found)] = reference_run(as_model(path), inputs=self.inputs).outputs
        return difference(self.expected, found)

    def convert(self, source: Path | ModelBundle, target: Path, **options: Any) -> ConversionReport:
        """Convert with a verification on the same input."""
        return convert(source, target, ConvertOptions(verify_inputs=self.inputs, **options))


@pytest.fixture(scope="module")
def exported() -> dict[str, Exported]:
    """Return the three modules, each exported once."""
    return {name: Exported(name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_torch_to_onnx_to_json_to_onnx(exported: dict[str, Exported], tmp_path: Path, name: str) -> None:
    """Each step is within 1e-5 of torch, and its own verification found no more."""
    model, source = exported[name], exported[name].bundle
    for target in (tmp_path / "first.onnx", tmp_path / "graph.json", tmp_path / "again.onnx"):
        report = model.convert(source, target)
        assert report.comparison is not None
        assert report.comparison.ok
        assert model.error_of(target).relative_l2 <= 1e-5
        source = target


@pytest.mark.parametrize("name", NAMES)
def test_f16_is_within_its_tolerance(exported: dict[str, Exported], tmp_path: Path, name: str) -> None:
    """Half the bytes, and 5e-3 of torch at most; but not nothing, since it was rounded."""
    model, target = exported[name], tmp_path / "half.onnx"
    report = model.convert(model.bundle, target, precision="f16")
    assert report.after.weight_bytes["f16"] > 0.4 * report.before.weight_bytes["f32"]
    assert 1e-6 < model.error_of(target).relative_l2 <= 5e-3


def test_int8_static_keeps_the_direction_of_the_convnet(exported: dict[str, Exported], tmp_path: Path) -> None:
    """Calibrated on random images, the cosine to torch is at least 0.99."""
    model, target = exported["convnet"], tmp_path / "int8.onnx"
    name = next(iter(model.inputs))
    images = np.random.default_rng(0).standard_normal((16, 2, 3, 16, 16)).astype(np.float32)
    report = model.convert(model.bundle, target, quantize="int8-static", calibration={name: images})
    assert "i8" in report.after.weight_bytes
    assert 0.99 <= model.error_of(target).cosine < 1


def test_int4_weights_keep_the_direction_of_the_decoder(exported: dict[str, Exported], tmp_path: Path) -> None:
    """With 4 bits a weight the cosine to torch is at least 0.98."""
    model, target = exported["decoder"], tmp_path / "int4.onnx"
    report = model.convert(model.bundle, target, quantize="int4-weights")
    assert sum(report.after.weight_bytes.values()) < 0.5 * sum(report.before.weight_bytes.values())
    assert 0.98 <= model.error_of(target).cosine < 1


def test_a_source_file_is_left_as_it_is(exported: dict[str, Exported], tmp_path: Path) -> None:
    """Converting reads the source and no more."""
    model = exported["convnet"]
    model.convert(model.bundle, tmp_path / "first.onnx")
    before = (tmp_path / "first.onnx").read_bytes()
    model.convert(tmp_path / "first.onnx", tmp_path / "second.onnx", precision="f16", simplify=True)
    assert (tmp_path / "first.onnx").read_bytes() == before
