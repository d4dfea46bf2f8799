"""Claims read from the kernel registry agree with where ONNX Runtime really puts a node."""

from __future__ import annotations

import pytest

from rlx_ort import Device, DType, RlxError
from rlx_ort.ir.types import TensorType
from rlx_ort.providers.claims import schema_version, takes
from rlx_ort.providers.registry import default_registry

F32, F16, I64, F64, BOOL = (TensorType(DType.parse(name)) for name in ("f32", "f16", "i64", "f64", "bool"))
NAMES = {DType.F32: "float", DType.F16: "float16", DType.I64: "int64", DType.F64: "double", DType.BOOL: "bool"}
UNARY = ["Abs", "Neg", "Sin", "Exp", "Erf", "Relu", "Sigmoid", "Tanh", "Sqrt", "Floor", "Softmax", "Identity", "Det"]
BINARY = ["Add", "Mul", "MatMul", "Pow", "Max", "Equal", "Less"]


def kernels(kind: str):
    provider = default_registry().for_device(Device(kind))
    claims = provider.claims()
    assert claims
    return provider.ep_name, claims


def assigned(open_model, kind: str, op: str, dtype: DType) -> bool:
    """Whether ONNX Runtime gives a model of one node to the provider of a device kind."""
    shape = "[2,2]"
    out = "bool" if op in ("Equal", "Less") else NAMES[dtype]
    result = f"{out} y" if op == "Det" else f"{out}{shape} y"
    arguments = "x, x" if op in BINARY else "x"
    try:
        session = open_model(f"({NAMES[dtype]}{shape} x) => ({result}) {{ y = {op}({arguments}) }}", device=kind)
    except RlxError:
        return False
    name, _ = kernels(kind)
    return bool(session.assignments) and all(node.provider == name for node in session.assignments)


@pytest.mark.webgpu
@pytest.mark.parametrize("op", [*UNARY, *BINARY])
def test_webgpu_takes_what_its_registry_claims(open_model, op):
    """The claim and the real assignment agree for five element types."""
    _, claims = kernels("webgpu")
    for kind in (F32, F16, I64, F64):
        inputs = (kind, kind) if op in BINARY else (kind,)
        claimed = takes(claims, "", op, 21, inputs)
        assert claimed == assigned(open_model, "webgpu", op, kind.dtype), (op, kind)


def test_the_cpu_claims_f32_and_not_bf16_addition():
    """The registry's element types are read."""
    _, claims = kernels("cpu")
    bf16 = TensorType(DType.BF16)
    assert takes(claims, "", "Add", 21, (F32, F32), (F32,))
    assert not takes(claims, "", "Add", 21, (bf16, bf16), (bf16,))


def test_an_operator_of_another_domain_is_found():
    """Fused operators live in com.microsoft."""
    _, claims = kernels("cpu")
    assert takes(claims, "com.microsoft", "FusedMatMul", 1, (F32, F32))
    assert not takes(claims, "", "FusedMatMul", 21, (F32, F32))


@pytest.mark.parametrize(("opset", "since"), [(6, 6), (12, 7), (13, 13), (21, 14)])
def test_the_schema_version_is_the_last_change_up_to_the_opset(opset, since):
    """Add changed in opsets 6, 7, 13 and 14 (ONNX's Operators.md)."""
    assert schema_version("", "Add", opset) == since


def test_compiling_providers_list_no_kernels():
    """A provider that compiles whole subgraphs has no claims; only a session shows what it takes."""
    assert default_registry().for_device(Device.TENSORRT).claims() is None
