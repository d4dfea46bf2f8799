"""The cases of the ONNX backend test suite, as they lie in the `onnx` wheel, in one form."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
from onnx.backend.test.loader import load_model_tests

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator", "light")
DATA = Path(onnx.backend.test.__file__).parent / "data"

DataSet = tuple[Sequence[Any], Sequence[Any]]


@dataclass(frozen=True)
class Case:
    """One model with the inputs to feed and the outputs to expect.

    `load` returns the model's bytes and its data sets; it is called when the case runs, as some take much memory.
    """

    kind: str
    name: str
    rtol: float
    atol: float
    load: Callable[[], tuple[bytes, Sequence[DataSet]]]

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.name}"


@functools.cache
def all_cases() -> tuple[Case, ...]:
    """Every case; building the node cases runs their Python sources, which takes a few seconds."""
    return (*_node_cases(), *stored_cases(), *_light_cases())


def stored_cases() -> tuple[Case, ...]:
    """The cases whose models lie in the wheel as files."""
    return tuple(case for kind in ("simple", "pytorch-converted", "pytorch-operator") for case in _stored_cases(kind))


def _node_cases() -> list[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sources of the cases divide by zero and overflow on purpose
        found = load_model_tests(kind="node")

    def load(test: Any) -> tuple[bytes, Sequence[DataSet]]:
        sets = [([_plain(v) for v in given], [_plain(v) for v in wanted]) for given, wanted in test.data_sets]
        return test.model.SerializeToString(), sets

    return [Case("node", t.name, t.rtol, t.atol, functools.partial(load, t)) for t in found]


def _stored_cases(kind: str) -> list[Case]:
    def load(folder: Path) -> tuple[bytes, Sequence[DataSet]]:
        model = onnx.load(folder / "model.onnx")
        sets = []
        for data in sorted(folder.glob("test_data_set*")):
            given = [
                _read(data / f"input_{i}.pb", v.type)
                for i, v in enumerate(_fed(model))
                if (data / f"input_{i}.pb").exists()
            ]
            wanted = [_read(data / f"output_{i}.pb", v.type) for i, v in enumerate(model.graph.output)]
            sets.append((given, wanted))
        return (folder / "model.onnx").read_bytes(), sets

    cases = []
    for folder in sorted(path for path in (DATA / kind).iterdir() if (path / "model.onnx").exists()):
        limits = json.loads((folder / "data.json").read_text("utf-8")) if (folder / "data.json").exists() else {}
        rtol, atol = limits.get("rtol", 1e-3), limits.get("atol", 1e-7)
        cases.append(Case(kind, folder.name, rtol, atol, functools.partial(load, folder)))
    return cases


def _light_cases() -> list[Case]:
    """Image classifiers whose weights are constants of one value, which keeps the files small."""

    def load(path: Path) -> tuple[bytes, Sequence[DataSet]]:
        model = onnx.load(path)
        given = []
        for value in _fed(model):
            shape = [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim]
            count = int(np.prod(shape))
            given.append((np.arange(count).reshape(shape) / count).astype(np.float32))
        wanted = [_read(path.with_name(f"{path.stem}_output_{i}.pb"), v.type) for i, v in enumerate(model.graph.output)]
        return path.read_bytes(), [(given, wanted)]

    limits = {}
    for folder in (DATA / "real").iterdir():
        if (folder / "data.json").exists():
            entry = json.loads((folder / "data.json").read_text("utf-8"))
            limits[Path(entry["url"]).stem] = (entry.get("rtol", 1e-3), entry.get("atol", 1e-7))
    return [
        Case("light", path.stem, *limits.get(path.stem, (1e-3, 1e-7)), functools.partial(load, path))
        for path in sorted((DATA / "light").glob("*.onnx"))
    ]


def _fed(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def _plain(value: Any) -> Any:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _read(path: Path, kind: onnx.TypeProto) -> Any:
    data = path.read_bytes()
    if kind.HasField("sequence_type"):
        return onnx.numpy_helper.to_list(onnx.SequenceProto.FromString(data))
    if kind.HasField("optional_type"):
        return onnx.numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
    return onnx.numpy_helper.to_array(onnx.TensorProto.FromString(data))
