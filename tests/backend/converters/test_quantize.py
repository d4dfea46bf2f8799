"""Quantised models: close to the source, smaller, quiet, and refused for input that cannot be."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_suite.emptied import Emptied, verdicts
from sample_models.bundles import convnet, cosine, decoder, images, run, tokens

from rlx_ort.converters.bundle import ModelBundle, bundle_of
from rlx_ort.converters.transforms.quantize import QuantizeOptions, quantize
from rlx_ort.errors import ConversionError
from rlx_ort.providers.engine.runtime import quantization

pytest.importorskip("onnx_ir")


def ops(bundle: ModelBundle) -> list[str]:
    return [node.op_type for node in bundle.proto.graph.node]


def test_a_statically_quantised_convnet_is_close_and_smaller() -> None:
    """Cosine of 0.99 at least on images that calibration did not see; 0.9998 was measured."""
    source = convnet()
    made, report = quantize(source, "int8-static", quantization(), calibration={"image": images(16)})
    feeds = {"image": images(8, seed=1)}
    assert cosine(run(made, feeds)[0], run(source, feeds)[0]) >= 0.99
    assert report.bytes_after < 0.5 * report.bytes_before
    assert report.samples == 16
    assert report.quantized_ops["DequantizeLinear"] >= 12  # five convolutions and a product, in and out


@pytest.mark.parametrize("source", [convnet, decoder], ids=["convnet", "decoder"])
def test_dynamic_quantisation_needs_no_samples(source: object) -> None:
    """Cosine of 0.99 at least for both; 0.99999 and 0.997 were measured."""
    bundle = source()  # type: ignore[operator]  # one of two builders
    made, report = quantize(bundle, "int8-dynamic", quantization())
    feeds = {"image": images(4)} if bundle.origin == "convnet" else {"ids": tokens(4)}
    assert cosine(run(made, feeds)[0], run(bundle, feeds)[0]) >= 0.99
    assert report.bytes_after < 0.45 * report.bytes_before
    assert "MatMulInteger" in report.quantized_ops


@pytest.mark.parametrize("symmetric", [False, True])
def test_int4_weights_keep_a_decoder_close(symmetric: bool) -> None:
    """Cosine of 0.98 at least for 22 products with random weights; 0.985 and 0.983 were measured."""
    source, feeds = decoder(), {"ids": tokens(4, seed=1)}
    made, report = quantize(source, "int4-weights", quantization(), QuantizeOptions(symmetric=symmetric))
    assert report.quantized_ops == {"MatMulNBits": 22}
    assert "MatMul" not in {node.op_type for node in made.proto.graph.node if node.name.startswith("q_product")}
    assert cosine(run(made, feeds)[0], run(source, feeds)[0]) >= 0.98
    assert report.bytes_after < 0.2 * report.bytes_before
    assert not {"gate0", "lm_head"} & made.weights.keys()


def test_larger_blocks_are_smaller_and_less_exact() -> None:
    """128 rows a scale against 32."""
    source, feeds = decoder(1), {"ids": tokens(2)}
    wanted = run(source, feeds)[0]
    results = {}
    for block in (32, 128):
        made, report = quantize(source, "int4-weights", quantization(), QuantizeOptions(block_size=block))
        results[block] = (report.bytes_after, cosine(run(made, feeds)[0], wanted))
    assert results[128][0] < results[32][0]
    assert results[128][1] < results[32][1]


@pytest.mark.parametrize(("kind", "entry"), [("int4-weights", "q_product*"), ("int8-dynamic", "q_product0")])
def test_excluded_nodes_stay_as_they_are(kind: str, entry: str) -> None:
    """By name or by pattern."""
    made, _ = quantize(decoder(1), kind, quantization(), QuantizeOptions(exclude=(entry,)))
    assert "MatMul" in {node.op_type for node in made.proto.graph.node if node.name == "q_product0"}


def test_the_tools_print_and_log_nothing_and_leave_no_files(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the root logger is as it was, though importing the tools would set it up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = logging.getLogger()
    before = [*root.handlers], root.level
    quantize(convnet(), "int8-static", quantization(), calibration={"image": images(2)})
    quantize(decoder(1), "int4-weights", quantization())
    sys.stdout.flush()
    assert capfd.readouterr().out == ""
    assert ([*root.handlers], root.level) == before
    assert list(tmp_path.iterdir()) == []


def test_calibration_takes_samples_in_three_forms(tmp_path: Path) -> None:
    """A new first axis, the batch axis, a list, and all of it from an npz file, give the same model."""
    source, samples = convnet(), images(4)
    np.savez(tmp_path / "data.npz", image=samples)
    forms = [{"image": samples[:, None]}, {"image": samples}, {"image": [s[None] for s in samples]}]
    made = [quantize(source, "int8-static", quantization(), calibration=form)[0] for form in forms]
    made.append(quantize(source, "int8-static", quantization(), calibration=tmp_path / "data.npz")[0])
    protos = {bundle.proto.SerializeToString(deterministic=True) for bundle in made}
    assert len(protos) == 1
    assert made[0].weights.keys() == made[3].weights.keys()


IMAGES = images(2)


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        (None, "int8-static needs calibration data"),
        ({"imag": IMAGES}, "'imag' is not an input of convnet; did you mean 'image'"),
        ({"image": IMAGES, "more": IMAGES}, "'more' is not an input"),
        ({"image": IMAGES[:, :2]}, r"sample of 'image' has shape \[1, 2, 24, 24\], it takes \[n, 3, 24, 24\]"),
        ({"image": IMAGES[0, 0]}, r"has shape \[24, 24\]; it needs 4 axes, or 5 with the samples first"),
        ({"image": IMAGES[:0]}, "one at least; got 'image' 0"),
        ({"image": IMAGES.astype(complex)}, "'image' is complex128, the input is f32"),
        ({"image": np.array([object()] * 2)}, "holds Python objects"),
    ],
)
def test_calibration_data_that_does_not_fit_is_refused(calibration: object, message: str) -> None:
    """Before anything is run."""
    with pytest.raises(ConversionError, match=message):
        quantize(convnet(), "int8-static", None, calibration=calibration)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("int3", QuantizeOptions(), "quantisation 'int3' is not known; give one of int8-dynamic"),
        ("int4-weights", QuantizeOptions(block_size=24), "block size 24 was asked for; it is a power of two"),
        ("int8-dynamic", QuantizeOptions(exclude=("nope",)), "'nope' of the nodes to leave out is not a node"),
    ],
)
def test_options_that_make_no_sense_are_refused(kind: str, options: QuantizeOptions, message: str) -> None:
    """The message says what there is."""
    with pytest.raises(ConversionError, match=message):
        quantize(convnet(), kind, None, options)


def test_data_that_would_not_count_and_a_model_with_nothing_to_quantise_are_refused() -> None:
    """Else the user would think that something was done; the convnet has one product, of 16 rows, below a block."""
    with pytest.raises(ConversionError, match="int8-dynamic takes no calibration data"):
        quantize(convnet(), "int8-dynamic", None, calibration={"image": IMAGES})
    with pytest.raises(ConversionError, match="int4-weights finds nothing to quantise in convnet"):
        quantize(convnet(), "int4-weights", quantization())


def _of_scikit_learn(nodes: list[onnx.NodeProto], output: onnx.ValueInfoProto, **weights: np.ndarray) -> ModelBundle:
    """Return a model of three inputs as skl2onnx writes it, which imports ai.onnx twice."""
    graph = helper.make_graph(
        nodes,
        "pipeline",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [None, 3])],
        [output],
        [numpy_helper.from_array(data, name) for name, data in weights.items()],
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in (("ai.onnx.ml", 1), ("", 21), ("", 21))]
    return bundle_of(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def test_a_linear_regression_has_nothing_to_quantise() -> None:
    """The refusal is that of every model without a product, and not an error of the tools."""
    node = helper.make_node(
        "LinearRegressor", ["X"], ["y"], domain="ai.onnx.ml", coefficients=[1.0, 2.0, 3.0], intercepts=[0.5]
    )
    source = _of_scikit_learn([node], helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 1]))
    with pytest.raises(ConversionError, match="finds nothing to quantise"):
        quantize(source, "int8-dynamic", quantization())


def test_a_classifier_with_maps_is_quantised() -> None:
    """The product of its network is, and the maps stay as they are declared."""
    nodes = [
        helper.make_node("MatMul", ["X", "w"], ["scores"]),
        helper.make_node("ZipMap", ["scores"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[3, 5]),
    ]
    kind = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    output = helper.make_value_info("y", helper.make_sequence_type_proto(kind))
    weights = np.array([[1, 2], [3, 4], [5, -6]], np.float32)
    made, report = quantize(_of_scikit_learn(nodes, output, w=weights), "int8-dynamic", quantization())
    assert report.quantized_ops["MatMulInteger"] == 1
    x = np.array([[0.5, 1, -1], [1, 0, 0.25]], np.float32)
    for row, found in zip(x.astype(np.float64) @ weights, run(made, {"X": x})[0], strict=True):
        assert [*found] == [3, 5]
        np.testing.assert_allclose([*found.values()], row, atol=0.1)


def test_a_quantised_recurrent_network_refuses_an_empty_batch() -> None:
    """Its operator ended the process, as the one that it stands for."""
    draw = np.random.default_rng(0)
    weights = {"w": draw.standard_normal((1, 16, 4), np.float32), "r": draw.standard_normal((1, 16, 4), np.float32)}
    kinds = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["steps", "rows", 4])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    node = helper.make_node("LSTM", ["x", *weights], ["y"], hidden_size=4)
    initial = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(
        helper.make_graph([node], "g", kinds, outputs, initial), opset_imports=opset, ir_version=8
    )
    made, _ = quantize(bundle_of(model), "int8-dynamic", quantization())
    assert "DynamicQuantizeLSTM" in ops(made)
    data = made.proto.SerializeToString()
    cases = [Emptied(f"{rows} rows", data, {"x": np.ones((3, rows, 4), np.float32)}) for rows in (2, 0)]
    assert verdicts("cpu", cases) == ({"unjudged": 1, "refused": 1}, [])
