"""Exported programs of PyTorch: what PyTorch would execute of them never reaches it."""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_models.source_files import Trap

from rlx_ort.converters.sources import open_source, pt2
from rlx_ort.converters.sources.pt2 import checked_config, checked_program
from rlx_ort.errors import ConversionError

PARTS = ("models/model.json", "data/weights/weight_0", "data/weights/model_weights_config.json")
WEIGHTS = {"path_name": "weight_0", "is_param": True, "use_pickle": False, "tensor_meta": {"dtype": 7, "sizes": []}}


def program(**changes: Any) -> dict[str, Any]:
    """Return a small program as PyTorch writes it, with some entries replaced."""
    node = {
        "target": "torch.ops.aten.add.Tensor",
        "inputs": [{"name": "self", "arg": {"as_tensor": {"name": "x"}}, "kind": 1}],
        "outputs": [{"as_tensor": {"name": "add"}}],
        "metadata": {"stack_trace": "File ..."},
        "name": "add",
    }
    node |= {key: value for key, value in changes.items() if key in ("target", "name")}
    size = {"as_expr": {"expr_str": changes.get("size", "Mul(Integer(2), Symbol('s7', positive=True, integer=True))")}}
    leaf = json.dumps([1, {"type": changes.get("tree", "builtins.tuple"), "context": "null", "children_spec": []}])
    call = {
        "fqn": changes.get("fqn", ""),
        "signature": {"in_spec": leaf, "forward_arg_names": [changes.get("argument", "x")]},
    }
    return {
        "graph_module": {
            "graph": {"nodes": [node], "tensor_values": {"x": {"sizes": [size, {"as_int": 3}]}}},
            "module_call_graph": [call],
            "treespec_namedtuple_fields": changes.get("tuples", {}),
        },
        "guards_code": ["__import__('os').abort()"],
        "verifiers": ["TRAINING", "os"],
    }


def encoded(document: Any) -> bytes:
    return json.dumps(document).encode()


def test_a_harmless_program_passes_without_guards_and_notes() -> None:
    """Guards are Python that PyTorch would execute; notes name modules it would look up."""
    found = json.loads(checked_program(encoded(program())))
    assert found["guards_code"] == []
    assert found["verifiers"] == ["TRAINING"]
    assert found["graph_module"]["graph"]["nodes"][0]["metadata"] == {}
    assert found["graph_module"]["graph"]["tensor_values"] == program()["graph_module"]["graph"]["tensor_values"]


REFUSED: dict[str, list[dict[str, Any]]] = {
    # PyTorch would look the name up in its modules and call what it finds
    "not one of the operators known to be harmless": [
        {"target": target}
        for target in (
            "torch.os.system",
            "torch.hub.load",
            "torch.load",
            "torch.ops.load_library",
            "torch.ops.load_library.__call__.x",
            "torch.ops.aten.__class__.mro",
            "torch.ops.aten.add.__class__",
            "torch.ops.mine.add.default",
            "torch.ops.higher_order.call_torchbind",
            "_operator.attrgetter",
            "_operator.methodcaller",
            "math.__loader__.load_module",
            "#extension",
            "os.system",
            "",
            7,
        )
    ],
    # PyTorch gives a size to sympy, which evaluates it as Python
    "not plain arithmetic": [
        {"size": size}
        for size in (
            "__import__('os').abort()",
            "Symbol('__import__(\"os\").abort()')",
            "Symbol(__import__('os').abort())",
            "Symbol('s0', positive=__import__('os').abort())",
            "Symbol('s0').__class__",
            "Integer(2)(3)",
            "[x for x in (1,)]",
            "lambda: 1",
            "exec('1')",
            "Lambda(Symbol('s0'), 1)",
            "Pow(Integer(9), Pow(Integer(9), Integer(9)))",
            "Pow(Integer(9), Integer(999999999))",
            "Pow(Pow(Pow(Pow(Pow(Integer(9), Integer(8)), Integer(8)), Integer(8)), Integer(8)), Integer(8))",
            "Add(" * 1000 + ")" * 1000,
            "(" * 500,
            "s0 + 1",
            "Integer('7; import os')",
            "\x00",
            "",
            None.__class__.__name__,
            ["Integer(1)"],
        )
    ],
    # PyTorch writes names into Python code and executes that
    "not a plain name|not a dotted name": [
        {"name": "x): import os #"},
        {"argument": "x=__import__('os').abort()"},
        {"argument": "x\ny"},
        {"fqn": "a b"},
        {"fqn": 7},
    ],
    # PyTorch would import the module
    "not plain tuples, lists or dicts": [
        {"tree": tree} for tree in ("collections.defaultdict", "mine.Tuple", "builtins.slice", 7)
    ],
    "named tuples": [{"tuples": {"mine.Pair": {"field_names": ["a"]}}}],
}


@pytest.mark.parametrize(
    ("message", "changes"), [(message, changes) for message, rows in REFUSED.items() for changes in rows]
)
def test_a_program_that_pytorch_would_run_code_for_is_refused(message: str, changes: dict[str, Any]) -> None:
    """Each of these reaches Python's evaluation, import or call of a name inside PyTorch."""
    with pytest.raises(ConversionError, match=message):
        checked_program(encoded(program(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"target": "torch.ops.aten._softmax.default"},
        {"target": "torch.ops.aten.__and__.Tensor"},
        {"target": "torch.ops.aten.scaled_dot_product_attention.default"},
        {"target": "torch.ops.prims.convert_element_type.default"},
        {"target": "torch.ops.higher_order.cond"},
        {"target": "_operator.floordiv"},
        {"target": "math.ceil"},
        {"target": "torch.sym_float"},
        {"size": "Symbol('s77', positive=True, integer=True)"},
        {"size": "Add(FloorDiv(Add(Symbol('s27', positive=True, integer=True), Integer(-3)), Integer(2)), Integer(1))"},
        {"size": "Max(Integer(1), Mul(Integer(3), Pow(Symbol('s0', positive=True, integer=True), Integer(2))))"},
        {"size": "Mul(Float('0.5', precision=53), Symbol('u0', integer=True))"},
    ],
)
def test_operators_and_sizes_as_pytorch_writes_them_pass(changes: dict[str, Any]) -> None:
    """On tensors, on sizes, and control flow; sizes are taken from files of torch 2.13."""
    checked_program(encoded(program(**changes)))


@pytest.mark.parametrize(
    "change",
    [{"use_pickle": True}, {"path_name": "opaque_obj_0"}, {"path_name": "custom_obj_0"}, {"path_name": "../weight_0"}],
)
def test_weights_that_are_pickles_are_refused(change: dict[str, Any]) -> None:
    """Or objects of any other kind, or have a path for a name."""
    checked_config(encoded({"config": {"w": WEIGHTS}}), "the weights")
    with pytest.raises(ConversionError, match="a pickle or as an object"):
        checked_config(encoded({"config": {"w": WEIGHTS | change}}), "the weights")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"7", b'{"config": []}', b'{"config": {"w": 1}}', b"\xff", b"[" * 9999]
)
def test_tables_that_are_damaged_are_refused(content: bytes) -> None:
    """Whatever they hold instead."""
    with pytest.raises(ConversionError):
        checked_config(content, "the weights")
    with pytest.raises(ConversionError):
        checked_program(content)


def test_an_archive_of_an_older_pytorch_is_refused(tmp_path: Path) -> None:
    """Its weights are pickles."""
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
        archive.writestr("serialized_exported_program.json", "{}")
        archive.writestr("serialized_state_dict.pt", pickle.dumps(Trap(tmp_path / "sprung")))
        archive.writestr("version", "8.8")
    with pytest.raises(ConversionError, match=r"torch 2\.8 and newer"):
        open_source(tmp_path / "m.pt2")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a program with a dynamic size, a buffer of 16-bit floats and a constant."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch has no types in CI
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 50)
            self.register_buffer("halves", torch.ones(3, dtype=torch.bfloat16))
            self.steps = torch.arange(5.0)

        def forward(self, x: Any) -> Any:
            return self.layer(x) + self.halves.float().sum() + self.steps.sum()

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("pt2") / "net.pt2"
    with warnings.catch_warnings(action="ignore"):
        net = torch.export.export(Net().eval(), (torch.zeros(2, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))
        torch.export.save(net, path)
    return path


def rewritten(source: Path, target: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """Copy an archive with the content of its members changed, or the members left out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = change(name.partition("/")[2], old.read(name))
            if content is not None:
                new.writestr(name, content)
    return target


def test_a_program_opens_with_its_weights_and_dynamic_sizes(saved: Path) -> None:
    """Through PyTorch's own exporter."""
    bundle = open_source(saved)
    (shape,) = (kind.shape for kind in bundle.input_types().values())  # type: ignore[union-attr]  # a tensor
    assert isinstance(shape[0], str)
    assert shape[1] == 4
    assert bundle.weights["layer.weight"].shape == (50, 4)


def test_sample_inputs_and_guards_that_would_do_harm_are_left_out(saved: Path, tmp_path: Path) -> None:
    """The program opens, and neither ran: PyTorch itself would have unpickled the one and executed the other."""
    sprung = tmp_path / "sprung"

    def harm(name: str, content: bytes) -> bytes:
        if name == "data/sample_inputs/model.pt":
            stream = io.BytesIO()
            with zipfile.ZipFile(stream, "w") as archive:
                archive.writestr("archive/data.pkl", pickle.dumps(Trap(sprung)))
                archive.writestr("archive/version", "3\n")
            return stream.getvalue()
        if name == "models/model.json":
            document = json.loads(content)
            document["guards_code"] = [f"__import__('pathlib').Path({str(sprung)!r}).touch()"]
            return json.dumps(document).encode()
        return content

    bundle = open_source(rewritten(saved, tmp_path / "harm.pt2", harm))
    assert bundle.weights.keys() == {"layer.weight", "layer.bias"}
    assert not sprung.exists()


def test_values_of_the_weights_are_those_that_were_saved(saved: Path, tmp_path: Path) -> None:
    """Changed in the file, they are changed in the bundle."""
    values = np.arange(200, dtype=np.float32)

    def change(name: str, content: bytes) -> bytes:
        return values.tobytes() if name == "data/weights/weight_0" else content

    bundle = open_source(rewritten(saved, tmp_path / "new.pt2", change))
    assert np.array_equal(bundle.weights["layer.weight"].numpy().reshape(-1), values)


@pytest.mark.parametrize("lacking", PARTS)
def test_a_program_that_lacks_a_part_is_refused(lacking: str, saved: Path, tmp_path: Path) -> None:
    """Named in the message."""
    path = rewritten(saved, tmp_path / "part.pt2", lambda name, content: None if name == lacking else content)
    with pytest.raises(ConversionError):
        open_source(path)


def test_damaged_programs_are_read_or_refused(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are too short, JSON that is changed: nothing but ConversionError comes out."""
    monkeypatch.setattr(pt2, "export_program", lambda *_: None)  # takes a second each, and is not what is tested here
    rng = np.random.default_rng(4)
    refused = 0
    for number in range(60):

        def change(name: str, content: bytes, number: int = number) -> bytes:
            if name != PARTS[number % 3]:
                return content
            at = int(rng.integers(0, len(content)))
            return content[:at] if number % 2 else content[:at] + rng.bytes(2) + content[at + 2 :]

        try:
            open_source(rewritten(saved, tmp_path / "copy.pt2", change))
        except ConversionError:
            refused += 1
    assert refused > 30


def test_programs_that_were_cut_off_are_refused(saved: Path, tmp_path: Path) -> None:
    """A zip archive has its directory at the end."""
    content = saved.read_bytes()
    for length in range(1, len(content), len(content) // 40):
        (tmp_path / "cut.pt2").write_bytes(content[:length])
        with pytest.raises(ConversionError):
            open_source(tmp_path / "cut.pt2")
