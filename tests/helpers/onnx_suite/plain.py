"""Plain ONNX Runtime on the raw model, the yardstick that the library must never fall short of, and the library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx.helper import tensor_dtype_to_np_dtype

from rlx_ort import GraphDevices, from_onnx

_FOREIGN = {"bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz", "int4", "uint4",
            "float4e2m1", "float8e8m0", "int2", "uint2"}  # fmt: skip
_PACKED = {ml_dtypes.int4: 2, ml_dtypes.uint4: 2, ml_dtypes.float4_e2m1fn: 2, ml_dtypes.int2: 4, ml_dtypes.uint2: 4}
_NUMBERS = {np.dtype(tensor_dtype_to_np_dtype(n)): n for n in (16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26)}
_BY_TEXT = {
    "bfloat16": 16, "float8e4m3fn": 17, "float8e4m3fnuz": 18, "float8e5m2": 19, "float8e5m2fnuz": 20, "uint4": 21,
    "int4": 22, "float4e2m1": 23, "float8e8m0": 24, "uint2": 25, "int2": 26,
}  # fmt: skip


def run_with_rlx(model: bytes, inputs: Sequence[Any]) -> list[Any]:
    """Run a model on the CPU through the library."""
    graph = from_onnx(model)
    names = [value.name for value in graph.inputs]
    return list(GraphDevices(graph).run("cpu", dict(zip(names, inputs, strict=False))))


def engine_exceptions() -> tuple[type[Exception], ...]:
    """Return the exceptions that plain ONNX Runtime refuses a model or fails with."""
    found = vars(ort.capi.onnxruntime_pybind11_state).values()
    return (RuntimeError, *(each for each in found if isinstance(each, type) and issubclass(each, Exception)))


def run_plain(model: bytes, inputs: Sequence[Any]) -> list[Any]:
    """Run the model with `InferenceSession`; element types numpy lacks go through OrtValues."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # by default one for each core of the machine, which spin
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    declared = session.get_inputs()
    feeds = {
        spec.name: np.asarray(value) if isinstance(value, np.generic) else value
        for spec, value in zip(declared, inputs, strict=False)
    }
    types = [spec.type for spec in (*declared, *session.get_outputs())]
    if not any(_foreign(text) for text in types):
        return list(session.run(None, feeds))
    binding = session.io_binding()
    kept = []
    for name, value in feeds.items():
        array = np.ascontiguousarray(value).reshape(np.shape(value))  # which has an axis by then
        number = _NUMBERS.get(array.dtype)
        if number is None:
            kept.append(ort.OrtValue.ortvalue_from_numpy(array))
        else:
            kept.append(ort.OrtValue.ortvalue_from_numpy_with_onnx_type(_packed(array), number))
        binding.bind_ortvalue_input(name, kept[-1])
    for spec in session.get_outputs():
        binding.bind_output(spec.name)
    session.run_with_iobinding(binding)
    return [_array(value) for value in binding.get_outputs()]


def _foreign(text: str) -> bool:
    return any(f"tensor({name})" in text for name in _FOREIGN)


def _packed(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array with packed elements at the front of a buffer of the logical shape, as ONNX Runtime reads it."""
    per_byte = _PACKED.get(array.dtype.type, 1)
    if per_byte == 1:
        return array
    bits = 8 // per_byte
    flat = array.reshape(-1).view(np.uint8) & ((1 << bits) - 1)
    buffer = np.zeros(array.size, np.uint8)
    for index, item in enumerate(flat):
        buffer[index // per_byte] |= item << (bits * (index % per_byte))
    return buffer.reshape(array.shape)


def _array(value: Any) -> Any:
    text = value.data_type().removeprefix("tensor(").removesuffix(")")
    if text not in _FOREIGN:
        return value.numpy()
    dtype = np.dtype(tensor_dtype_to_np_dtype(_BY_TEXT[text]))
    size = value.tensor_size_in_bytes()
    raw = np.frombuffer(ctypes.string_at(value._ortvalue.data_ptr(), size), np.uint8)
    per_byte = _PACKED.get(dtype.type, 1)
    if per_byte > 1:
        bits, count = 8 // per_byte, int(np.prod(value.shape()))
        raw = np.stack([(raw >> (bits * i)) & ((1 << bits) - 1) for i in range(per_byte)], -1).reshape(-1)[:count]
    return raw.astype(np.uint8).view(dtype).reshape(value.shape())
