"""The exported Triton repository, held against Triton's own schema of `config.pbtxt`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf import text_format

from rlx_ort import DType, Graph, PackageError, from_onnx
from rlx_ort.deploy.triton import INSTANCE_KINDS, batch_dim, config_text, export_triton


@pytest.fixture(scope="module")
def schema() -> ModuleType:
    """Return the generated module of `model_config.proto` in tritonclient; its package imports gRPC, the module not."""
    found = importlib.util.find_spec("tritonclient")
    if found is None or not found.submodule_search_locations:
        pytest.skip("tritonclient is not installed")
    path = Path(found.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("triton_model_config_pb2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(schema: ModuleType, text: str) -> Any:
    """Return the text as Triton reads it; an unknown field or a value of the wrong type is an error."""
    return text_format.Parse(text, schema.ModelConfig())


def classifier(rows: int | str = "rows") -> Graph:
    graph = Graph("classifier")
    x = graph.input("x", [rows, 4])
    w = graph.param("w", [4, 300], data=np.ones((4, 300), np.float32))
    graph.set_outputs([x @ w], ["scores"])
    return graph


def test_a_batched_model_is_what_the_schema_says(schema):
    """Triton adds the batch dimension itself, so the dims do not have it."""
    wanted = schema.ModelConfig(
        name="a",
        backend="onnxruntime",
        default_model_filename="model.onnx",
        max_batch_size=16,
        input=[schema.ModelInput(name="x", data_type=schema.TYPE_FP32, dims=[4])],
        output=[schema.ModelOutput(name="scores", data_type=schema.TYPE_FP32, dims=[300])],
        instance_group=[schema.ModelInstanceGroup(count=2, kind=schema.ModelInstanceGroup.KIND_GPU)],
        dynamic_batching=schema.ModelDynamicBatching(),
        version_policy=schema.ModelVersionPolicy(specific={"versions": [1]}),
    )
    assert parsed(schema, config_text(classifier(), "a", max_batch=16, instances=2, kind="gpu")) == wanted


def test_the_text_is_the_one_protobuf_writes(schema):
    """The same lines as protobuf's own printer writes, which has the fields in another order and leaves out zeros."""
    text = config_text(classifier(), "a", kind="gpu")
    again = text_format.MessageToString(parsed(schema, text))
    assert sorted(text.splitlines()) == sorted(again.splitlines())


@pytest.mark.parametrize(("rows", "max_batch"), [(2, 8), ("rows", 0)])
def test_a_model_that_is_not_batched_names_all_its_dims(schema, rows, max_batch):
    """A fixed first dim, or a caller who says no."""
    found = parsed(schema, config_text(classifier(rows), "a", max_batch=max_batch))
    assert found.max_batch_size == 0
    assert not found.HasField("dynamic_batching")
    assert list(found.input[0].dims) == [-1 if rows == "rows" else 2, 4]


def test_a_batch_must_be_the_first_dim_of_everything():
    """One input that is shared by all rows forbids to put requests together."""
    graph = Graph("two")
    x, scale = graph.input("x", ["rows", 4]), graph.input("scale", [4])
    graph.set_outputs([x * scale], ["y"])
    assert batch_dim(graph) is None
    assert batch_dim(classifier()) == "rows"


def mixing() -> Graph:
    """Return a graph whose rows all take their mean away."""
    graph = Graph("centred")
    x = graph.input("x", ["rows", 4])
    graph.set_outputs([x - graph.mean(x, [0])], ["y"])
    return graph


def test_a_model_whose_rows_influence_each_other_is_not_batched(schema):
    """Triton would put the rows of several clients together; a comment names the node."""
    text = config_text(mixing(), "a")
    assert text.splitlines()[0].startswith("# not batched: rows are not proved independent: ReduceMean")
    found = parsed(schema, text)
    assert (found.max_batch_size, found.HasField("dynamic_batching")) == (0, False)
    assert list(found.input[0].dims) == [-1, 4]


def test_a_model_is_batched_without_proof_where_the_caller_says_so(schema):
    """The caller may know better, or accept it."""
    text = config_text(mixing(), "a", batch_unproven=True)
    assert not text.startswith("#")
    assert parsed(schema, text).max_batch_size == 8


def test_an_output_whose_rows_have_another_name_is_batched(schema):
    """Exporters invent names for the dims of outputs; the proof shows that its rows are those of the inputs."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x) => (float[y_dim_0,4] y) { y = Relu(x) }'
    )
    assert parsed(schema, config_text(from_onnx(model), "a")).max_batch_size == 8


@pytest.mark.parametrize(
    ("takes", "body", "rows"),
    [
        ("float[1,4] x", "y = Relu(x)", 8),
        ("float[1,4] x, float[1,4] z", "y = Add(x, z)", 0),
    ],
)
def test_rows_without_a_name_are_batched_where_no_other_input_may_have_fewer(schema, takes, body, rows):
    """Converters of scikit-learn leave the first dim without a name; one row of two inputs may be broadcast."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g ({takes}) => (float[1,4] y) {{ {body} }}'
    )
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1  # as LightGBM's converter declares labels
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].Clear()
    assert parsed(schema, config_text(from_onnx(model), "a")).max_batch_size == rows


def test_an_output_with_other_rows_is_not_batched(schema):
    """Every second row is as open as all of them."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x) => (float[y_dim_0,4] y) {'
        "b = Constant<value_ints=[0]>() e = Constant<value_ints=[99]>() s = Constant<value_ints=[2]>()"
        "y = Slice(x, b, e, b, s) }"
    )
    text = config_text(from_onnx(model), "a")
    assert "takes some of the rows" in text.splitlines()[0]
    assert parsed(schema, text).max_batch_size == 0


def test_a_scalar_is_reshaped_since_triton_has_none(schema):
    """An empty list of dims is refused by Triton."""
    graph = Graph("scalar")
    x = graph.input("x", [])
    graph.set_outputs([x + x], ["y"])
    found = parsed(schema, config_text(graph, "a")).input[0]
    assert list(found.dims) == [1]
    assert found.HasField("reshape")
    assert list(found.reshape.shape) == []


@pytest.mark.parametrize("kind", INSTANCE_KINDS)
def test_instance_kinds_are_triton_s(schema, kind):
    """Every kind the command line takes is a value of the enum."""
    found = parsed(schema, config_text(classifier(), "a", kind=kind)).instance_group[0]
    assert schema.ModelInstanceGroup.Kind.Name(found.kind) == INSTANCE_KINDS[kind]


@pytest.mark.parametrize("dtype", list(DType))
def test_dtypes_are_triton_s_or_refused(schema, dtype):
    """Triton's type has the same size as ours; complex, 8-bit floats and 4-bit integers it does not have."""
    graph = Graph("typed")
    graph.outputs = [graph.input("x", ["rows"], dtype)]
    if dtype.value.startswith(("c", "f8", "f4", "i4", "u4", "i2", "u2")):
        with pytest.raises(PackageError, match="no type for 'x'"):
            config_text(graph, "a")
        return
    name = schema.DataType.Name(parsed(schema, config_text(graph, "a")).input[0].data_type)
    digits = "".join(letter for letter in name if letter.isdigit())
    assert name == "TYPE_STRING" if dtype is DType.STRING else name == "TYPE_BOOL" or int(digits) == dtype.bits


def test_names_of_any_letters_are_quoted(schema):
    """Quotes, backslashes, line ends and letters beyond ASCII come back as they were."""
    graph = classifier()
    name = 'é"\\\n'
    text = config_text(graph, name)
    assert text.isascii()
    assert parsed(schema, text).name == name


def test_the_repository_has_the_weights_once(tmp_path):
    """One version folder with the model and one data file, and onnx finds both right."""
    folder = export_triton(classifier(), tmp_path, "classifier")
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["classifier/1/model.onnx", "classifier/1/model.onnx.data", "classifier/config.pbtxt"]
    onnx.checker.check_model(folder / "1" / "model.onnx")
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert 4 * 300 * 4 <= total < 4 * 300 * 4 + 4096


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "a\\b", ".hidden", "a b", "x" * 101, "/a", "C:a", "nul", "AUX", "a."]
)
def test_a_name_that_is_no_folder_s_is_refused(tmp_path, name):
    """Nothing is written outside of the repository."""
    with pytest.raises(PackageError, match="cannot be the name"):
        export_triton(classifier(), tmp_path / "repository", name)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_there_is_replaced_on_request_only(tmp_path):
    """And nothing else of the repository changes."""
    export_triton(classifier(), tmp_path, "a")
    with pytest.raises(PackageError, match="exists"):
        export_triton(classifier(2), tmp_path, "a")
    export_triton(classifier(2), tmp_path, "a", overwrite=True)
    assert "max_batch_size: 0" in (tmp_path / "a" / "config.pbtxt").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_failure_leaves_the_old_model(tmp_path, monkeypatch):
    """The new one appears whole or not at all."""
    export_triton(classifier(), tmp_path, "a")

    def failing(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlx_ort.converters.files.save_onnx", failing)
    with pytest.raises(PackageError, match="No space left"):
        export_triton(classifier(), tmp_path, "a", overwrite=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "1",
        "a",
        "config.pbtxt",
        "model.onnx",
        "model.onnx.data",
    ]
