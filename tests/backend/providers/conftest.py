"""Models for provider tests, written in ONNX's text form, with weights outside as an export has them."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from rlx_ort import CompileOptions, Device
from rlx_ort.converters.onnx_types import elem_type, type_of
from rlx_ort.converters.to_onnx.exported import ExportedModel
from rlx_ort.ir.tensor import TensorData
from rlx_ort.providers.base import EngineSession, SessionRequest
from rlx_ort.providers.registry import default_registry

HEADER = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "ai.onnx.ml": 3]>'


def exported(text: str, weights: Mapping[str, TensorData] | None = None) -> ExportedModel:
    """Return a model written as text, with its weights declared as external data under their own names."""
    proto = onnx.parser.parse_model(f"{HEADER} g {text}")
    for number, node in enumerate(proto.graph.node):
        node.name = f"n{number}_{node.op_type}"
    for name, data in (weights or {}).items():
        tensor = proto.graph.initializer.add(
            name=name, data_type=elem_type(data.dtype), dims=data.shape, data_location=onnx.TensorProto.EXTERNAL
        )
        for key, value in (("location", name), ("offset", 0), ("length", data.nbytes)):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, str(value)
    inputs = {info.name: type_of(info.type) for info in proto.graph.input}
    outputs = {info.name: type_of(info.type) for info in proto.graph.output}
    return ExportedModel(
        model=proto,
        params=tuple(weights or {}),
        nodes=(),
        origin_names={},
        input_types=inputs,
        output_types=outputs,
    )


def open_text(
    text: str,
    weights: Mapping[str, TensorData | np.ndarray] | None = None,
    device: str = "cpu",
    **options: object,
) -> EngineSession:
    """Open a session on a model written as text."""
    data = {
        name: value if isinstance(value, TensorData) else TensorData.from_array(value)
        for name, value in (weights or {}).items()
    }
    target = Device(device)
    provider = default_registry().for_device(target)
    assert provider is not None
    return provider.open(SessionRequest(target, exported(text, data), data, CompileOptions().with_(**options)))


@pytest.fixture
def open_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineSession]:
    """Return `open_text`, with a compile cache of the test's own."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    return open_text


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs Python code in a process of its own, with variables set or (None) unset."""
    return functools.partial(_python)


def _python(code: str, timeout: float = 120, **variables: str | None) -> subprocess.CompletedProcess[str]:
    import os

    here = str(Path(__file__).parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
    for name, value in variables.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=timeout)
