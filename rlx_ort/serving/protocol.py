"""The Open Inference Protocol (v2): tensors and requests as JSON with binary parts, and its errors.

The protocol: https://github.com/kserve/open-inference-protocol. Triton's extension for binary tensors:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.deploy.triton import DATATYPES
from rlx_ort.errors import ServingError
from rlx_ort.fields import unique_keys
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType

Array: TypeAlias = npt.NDArray[Any]

_DTYPES = {name: dtype for dtype, name in DATATYPES.items()}
_NUMBERS = "biuf"  # numpy's kinds of JSON numbers and booleans
_COPIED_BYTES = 4 << 10  # of an unaligned array, at most
_LENGTH_BYTES = 4  # before each element of a binary BYTES tensor
_MOST_TENSORS = 1024
_LONGEST_NAME = 1024
_REMEMBERED, _REMEMBERED_BYTES = 256, 1 << 10  # how many heads of binary requests and answers, and of which size
PIECE = 1 << 14
"""Elements that are converted in one call: the interpreter lock is held until it ends, and others wait for it."""
_PIECE_BYTES = 64 << 10
JSON_FACTOR = 24
"""The most bytes in memory for a byte of JSON: an empty list, which is written with three characters, has 72."""
TEXT_BYTES = 160
"""What a text takes beside its characters: Python's object, two references to it, and the engine's copy."""
_MOST_TEXTS = 1 << 20  # the engine converts them without releasing the interpreter lock
_JSON_ELEMENT_BYTES = 64  # its text, twice while an answer is put together
_MOST_LISTS = 1 << 18  # in JSON: making them, and collecting garbage meanwhile, keeps the interpreter lock as long
_MOST_EMPTY = 1 << 16  # product of the other dims of a tensor without elements, which costs its sender nothing


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """An output that a request asks for, and whether its data is to be binary."""

    name: str
    binary: bool = False


@dataclass(slots=True)
class InferRequest:
    """A request for one inference.

    Attributes:
        inputs: name -> data.
        outputs: the wanted ones; None for all.
        id: the client's name for it, returned with the answer.
        parameters: those of the request; the protocol does not return them.
        binary: whether outputs that are not named are binary.
        priority: the smaller, the earlier it runs; 0 is the default priority.
        timeout_s: how long it may wait to be run, in seconds; None for the server's limit.
    """

    inputs: dict[str, Array]
    outputs: tuple[WantedOutput, ...] | None = None
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    binary: bool = False
    priority: int = 0
    timeout_s: float | None = None

    @property
    def is_binary(self) -> bool:
        """Whether every output is binary."""
        return self.binary if self.outputs is None else all(output.binary for output in self.outputs)


def datatype_of(kind: ValueType, name: str) -> str:
    """Return the protocol's name of a tensor's type.

    Raises:
        ServingError: the protocol has none.
    """
    datatype = DATATYPES.get(kind.dtype) if isinstance(kind, TensorType) else None
    if datatype is None:
        raise ServingError(f"{name!r} is {kind}, which the inference protocol cannot carry", 400)
    return datatype


class _Given(NamedTuple):
    """An input as the JSON of a request describes it: its data, or how many of the binary bytes are its own."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    size: Any
    data: Any


def parse_request(
    body: memoryview, header_bytes: int | None, take: Callable[[int], object] = lambda count: None
) -> InferRequest:
    """Return the request of a body: JSON, and behind its first `header_bytes` the binary data of inputs.

    Args:
        body: the body.
        header_bytes: the size of its JSON; None if there is nothing else.
        take: called with the bytes that are about to be taken in memory; it may raise.

    Raises:
        ServingError: the body is no request.
    """
    if header_bytes is not None and not 0 <= header_bytes <= len(body):
        raise ServingError(f"the header claims {header_bytes} bytes of JSON, and the body has {len(body)} bytes", 400)
    text = body if header_bytes is None else body[:header_bytes]
    remembered = header_bytes is not None and header_bytes <= _REMEMBERED_BYTES
    if len(text) > _PIECE_BYTES:
        take(JSON_FACTOR * len(text))
    given, about = (_remembered if remembered else _described)(bytes(text))
    rest = body[len(text) :]
    inputs: dict[str, Array] = {}
    at = 0
    for name, shape, dtype, size, data in given:
        if size is None:
            inputs[name] = array_of_flat(name, shape, dtype, _flattened(data, name))
            continue
        if type(size) is not int or not 0 <= size <= len(rest) - at:
            raise ServingError(
                f"input {name!r} has binary_data_size {size!r}, and {len(rest) - at} bytes are left", 400
            )
        inputs[name] = array_from_bytes(name, shape, dtype, rest[at : at + size], take)
        at += size
    if at != len(rest):
        raise ServingError(f"{len(rest) - at} bytes after the binary data belong to no input", 400)
    return InferRequest(
        inputs, about.outputs, about.id, about.parameters, about.binary, about.priority, about.timeout_s
    )


def _described(text: bytes) -> tuple[list[_Given], InferRequest]:
    """Return the inputs that the JSON of a request describes, and the request without them."""
    document = parse_document(text)
    described: dict[str, _Given] = {}
    for entry in _entries(document, "inputs"):
        parameters = _mapping(entry, "parameters")
        head = entry.get("name"), entry.get("shape"), entry.get("datatype")
        name, shape, dtype = checked_input(*head, parameters, described)
        size = parameters.get("binary_data_size")
        if size is None and "data" not in entry:
            raise ServingError(f"input {name!r} has no data", 400)
        if size is not None and "data" in entry:
            raise ServingError(f"input {name!r} has both data and binary_data_size", 400)
        described[name] = _Given(name, shape, dtype, size, entry.get("data"))
    return list(described.values()), request_of({}, document)


_remembered = functools.lru_cache(maxsize=_REMEMBERED)(_described)
"""Clients send the same JSON before each of their tensors; reading it takes longer than a small inference."""


def request_of(inputs: dict[str, Array], document: Mapping[str, Any]) -> InferRequest:
    """Return the request with these inputs; its outputs and parameters come from the document."""
    parameters = _mapping(document, "parameters")
    binary = _flag(parameters, "binary_data_output")
    outputs = None
    if document.get("outputs"):
        outputs = tuple(_wanted(entry, binary) for entry in _entries(document, "outputs"))
        if len({output.name for output in outputs}) != len(outputs):
            raise ServingError("an output is asked for twice", 400)
    id = document.get("id", "")
    if not isinstance(id, str):
        raise ServingError(f"the request's id is {id!r}, not a text", 400)
    for key in ("sequence_id", "sequence_start", "sequence_end"):
        if parameters.get(key):
            raise ServingError(f"the parameter {key} is for stateful models, which are not served", 400)
    priority, timeout_us = (_whole(parameters, key) for key in ("priority", "timeout"))
    timeout_s = timeout_us / 1e6 if timeout_us else None
    return InferRequest(inputs, outputs, id, parameters, binary, priority, timeout_s)


def array_of_flat(name: str, shape: Sequence[int], dtype: DType, flat: Sequence[Any]) -> Array:
    """Return the elements of a tensor, which JSON or a message holds, as an array.

    Raises:
        ServingError: it has other elements than the type or the shape says.
    """
    _check_count(name, len(flat), shape)
    wanted: set[type] = {str}
    if dtype is DType.STRING:
        check_texts(name, len(flat))
    else:
        wanted = {bool} if dtype is DType.BOOL else {int} if dtype.is_integer else {int, float}
    array = np.empty(len(flat), object if dtype is DType.STRING else dtype.numpy)
    for at in range(0, len(flat), PIECE):
        piece = flat[at : at + PIECE]
        if not set(map(type, piece)) <= wanted:
            raise ServingError(f"input {name!r} is {DATATYPES[dtype]} and holds other JSON values", 400)
        array[at : at + PIECE] = _piece_of(name, dtype, piece)
    return array.reshape(shape)


def _piece_of(name: str, dtype: DType, piece: Sequence[Any]) -> Array:
    try:
        if dtype is DType.STRING:
            for text in piece:
                text.encode()  # JSON escapes can write half of a surrogate pair
            return np.array(piece, object)
        with np.errstate(over="ignore"):
            array = np.array(piece, dtype.numpy)
    except (OverflowError, ValueError, TypeError) as err:
        raise ServingError(f"input {name!r} does not fit {DATATYPES[dtype]}: {err}", 400) from err
    if dtype.is_float and not np.isfinite(array).all():
        raise ServingError(f"input {name!r} has numbers beyond {DATATYPES[dtype]}", 400)
    return array


def array_from_bytes(
    name: str, shape: Sequence[int], dtype: DType, data: memoryview, take: Callable[[int], object] = lambda count: None
) -> Array:
    """Return binary data, little-endian in C order, as an array; it shares memory with large data and aligned one.

    Large data is not copied here, on the loop of the server: its array may be unaligned.

    Before texts are made, `take` is called with the bytes that they take in memory; it may raise.

    Raises:
        ServingError: it has another size than the type and shape say.
    """
    elements = math.prod(shape)
    if dtype is DType.STRING:
        most = min(elements, len(data) // _LENGTH_BYTES)
        check_texts(name, most)
        take(most * TEXT_BYTES + len(data))
        texts = list(_texts(name, data, elements))
        _check_count(name, len(texts), shape)
        return np.array(texts, object).reshape(shape)
    if len(data) != dtype.nbytes(elements):
        raise ServingError(
            f"input {name!r} has {len(data)} bytes; {DATATYPES[dtype]} {list(shape)} takes {dtype.nbytes(elements)}",
            400,
        )
    array = np.frombuffer(data, dtype.numpy).reshape(shape)
    return array if array.flags.aligned or array.nbytes > _COPIED_BYTES else array.copy()


def bytes_of(array: Array) -> bytes | memoryview:
    """Return an array as the protocol's binary data; large numeric ones share its memory."""
    if array.dtype != object:
        whole = array.base is None or not isinstance(array.base, np.ndarray) or array.base.nbytes < 2 * array.nbytes
        if array.nbytes > _PIECE_BYTES and array.flags.c_contiguous and whole:  # else a batch would stay in memory
            return array.reshape(-1).view(np.uint8).data
        return np.ascontiguousarray(array).tobytes()
    flat = array.ravel()
    return b"".join([b"".join(_with_lengths(flat[at : at + PIECE])) for at in range(0, flat.size, PIECE)])


def _with_lengths(texts: Iterable[Any]) -> Iterator[bytes]:
    for item in texts:
        text = item if isinstance(item, bytes) else str(item).encode()
        yield len(text).to_bytes(_LENGTH_BYTES, "little")
        yield text


def answer(
    request: InferRequest, model: str, version: str, outputs: Mapping[str, Array], datatypes: Mapping[str, str]
) -> tuple[bytes, list[bytes | memoryview]]:
    """Return the JSON of an answer and the binary parts behind it, in order."""
    wanted = request.outputs or tuple(WantedOutput(name, request.binary) for name in outputs)
    if request.is_binary and not request.id:
        parts = [bytes_of(outputs[output.name]) for output in wanted]
        described = [(out.name, datatypes[out.name], outputs[out.name].shape) for out in wanted]
        return _binary_head(model, version, tuple(described), tuple(map(len, parts))), parts
    entries, parts = list[bytes](), list[bytes | memoryview]()
    for output in wanted:
        array = outputs[output.name]
        entry: dict[str, Any] = {"name": output.name, "datatype": datatypes[output.name], "shape": list(array.shape)}
        if output.binary:
            parts.append(bytes_of(array))
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
            entries.append(_json(entry))
        else:
            entries.append(b'%s,"data":[%s]}' % (_json(entry)[:-1], _json_data(array, output.name)))
    return _head(model, version, entries, request.id), parts


def bytes_of_array(array: Array) -> int:
    """Return the bytes of an array, texts without their characters."""
    return array.size * TEXT_BYTES if array.dtype == object else array.nbytes


def answer_bytes(request: InferRequest, outputs: Mapping[str, Array]) -> int:
    """Return about how many bytes making an answer takes beside its outputs."""
    binary = {output.name: output.binary for output in request.outputs or ()}
    return sum(
        bytes_of_array(array) if binary.get(name, request.binary) else array.size * _JSON_ELEMENT_BYTES
        for name, array in outputs.items()
    )


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _head(model: str, version: str, entries: Sequence[bytes], id: str) -> bytes:
    start = _json({"model_name": model, "model_version": version})[:-1]
    end = b',"id":%s}' % _json(id) if id else b"}"
    return b'%s,"outputs":[%s]%s' % (start, b",".join(entries), end)


@functools.lru_cache(maxsize=_REMEMBERED)
def _binary_head(
    model: str, version: str, outputs: tuple[tuple[str, str, tuple[int, ...]], ...], sizes: tuple[int, ...]
) -> bytes:
    entries = [
        _json({"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}})
        for (name, datatype, shape), size in zip(outputs, sizes, strict=True)
    ]
    return _head(model, version, entries, "")


def _json_data(array: Array, name: str) -> bytes:
    """Return the elements as JSON with commas between them."""
    flat = array.ravel()
    return b",".join([_json(_json_list(flat[at : at + PIECE], name))[1:-1] for at in range(0, flat.size, PIECE)])


def _json_list(flat: Array, name: str) -> list[Any]:
    if flat.dtype == object:
        return [item.decode(errors="replace") if isinstance(item, bytes) else str(item) for item in flat]
    if flat.dtype.kind not in _NUMBERS:  # float types of ml_dtypes
        flat = flat.astype(np.float32)
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        raise ServingError(f"output {name!r} holds NaN or infinity, which JSON cannot carry; ask for binary data", 400)
    items: list[Any] = flat.tolist()
    return items


def parse_document(text: bytes | bytearray) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ServingError: the text is none, has a key twice, or has NaN or infinity, which are no JSON.
    """
    numbers: dict[str, Any] = {}
    if len(text) > _PIECE_BYTES:
        numbers = _SLOW_NUMBERS
        for mark, most in ((b"[", _MOST_LISTS), (b'"', 2 * _MOST_TEXTS)):
            if (count := text.count(mark)) > most:
                raise ServingError(
                    f"the JSON has {count} times {mark.decode()}; {most} are allowed; send binary data", 413
                )
    try:
        document = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_no_constant, **numbers)
    except (ValueError, RecursionError) as err:
        raise ServingError(f"the request is not JSON: {err}", 400) from err
    if not isinstance(document, dict):
        raise ServingError("the request is not a JSON object", 400)
    return document


_SLOW_NUMBERS: dict[str, Any] = {"parse_float": lambda text: float(text), "parse_int": lambda text: int(text)}
"""The parser is in C and keeps the interpreter lock; each call of a function in Python lets other threads have it."""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number; send it as binary data")


def check_texts(name: str, count: int) -> None:
    """Check that an input has not too many texts.

    Raises:
        ServingError: it has.
    """
    if count > _MOST_TEXTS:
        raise ServingError(f"input {name!r} has {count} texts; {_MOST_TEXTS} are allowed", 413)


def _check_count(name: str, count: int, shape: Sequence[int]) -> None:
    if count != math.prod(shape):
        raise ServingError(f"input {name!r} has {count} elements, which does not match its shape {list(shape)}", 400)


def _entries(document: Mapping[str, Any], key: str) -> Sequence[dict[str, Any]]:
    entries = document.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ServingError(f"{key!r} is not a list of objects", 400)
    check_tensors(key, len(entries))
    return entries


def check_tensors(key: str, count: int) -> None:
    """Check that a request has not too many inputs or outputs.

    Raises:
        ServingError: it has.
    """
    if count > _MOST_TENSORS:
        raise ServingError(f"{key!r} has {count} entries; {_MOST_TENSORS} are allowed", 400)


def checked_input(
    name: object, shape: object, datatype: object, parameters: Mapping[str, Any], earlier: Container[str]
) -> tuple[str, tuple[int, ...], DType]:
    """Return the name, the shape and the dtype of an input as a request describes it.

    Args:
        name: its name.
        shape: its sizes.
        datatype: the protocol's name of its type.
        parameters: its parameters.
        earlier: the names of the inputs before it.

    Raises:
        ServingError: one of them is missing or wrong, the input is given twice, or its data is in shared memory.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise ServingError("an input has no name", 400)
    sizes = list(shape) if isinstance(shape, Iterable) and not isinstance(shape, str | Mapping) else None
    if sizes is None or not all(type(size) is int and 0 <= size < 1 << 40 for size in sizes) or len(sizes) > 32:
        raise ServingError(f"the shape of {name!r} is {shape!r:.200}, not a list of sizes", 400)
    if 0 in sizes and math.prod(size for size in sizes if size) > _MOST_EMPTY:
        raise ServingError(f"the shape of {name!r} is {sizes}: without elements, and with outputs of any size", 400)
    dtype = _DTYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise ServingError(f"the datatype of {name!r} is {datatype!r}; known: {', '.join(_DTYPES)}", 400)
    if name in earlier:
        raise ServingError(f"input {name!r} is given twice", 400)
    _refuse_shared_memory(name, parameters)
    return name, tuple(sizes), dtype


def _wanted(entry: Mapping[str, Any], binary: bool) -> WantedOutput:
    name, parameters = entry.get("name"), _mapping(entry, "parameters")
    if not isinstance(name, str):
        raise ServingError("an output has no name", 400)
    _refuse_shared_memory(name, parameters)
    if parameters.get("classification"):
        raise ServingError(f"output {name!r}: the classification extension is not supported; take the scores", 400)
    return WantedOutput(name, _flag(parameters, "binary_data", binary))


def _refuse_shared_memory(name: str, parameters: Mapping[str, Any]) -> None:
    if any(key.startswith("shared_memory") for key in parameters):
        raise ServingError(f"{name!r} is in shared memory, which this server never reads; send the data", 400)


def _mapping(entry: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = entry.get(key)
    if value is not None and not isinstance(value, dict):
        raise ServingError(f"{key!r} is not an object", 400)
    return value or {}


def _flag(parameters: Mapping[str, Any], key: str, default: bool = False) -> bool:
    flag = parameters.get(key, default)
    if not isinstance(flag, bool):
        raise ServingError(f"the parameter {key} is {flag!r}, not true or false", 400)
    return flag


def _whole(parameters: Mapping[str, Any], key: str) -> int:
    number = parameters.get(key, 0)
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise ServingError(f"the parameter {key} is {number!r}, not a whole number from 0", 400)
    return number


def _flattened(data: Any, name: str) -> list[Any]:
    """Return the elements of nested lists, taken apart level by level."""
    if not isinstance(data, list):
        raise ServingError(f"the data of input {name!r} is not a list", 400)
    flat: list[Any] = data
    for _ in range(32):
        if not any(list in set(map(type, flat[at : at + PIECE])) for at in range(0, len(flat), PIECE)):
            return flat
        flat = list(itertools.chain.from_iterable(each if isinstance(each, list) else (each,) for each in flat))
    raise ServingError(f"the data of input {name!r} is nested too deeply", 400)


def _texts(name: str, data: memoryview, most: int) -> Iterator[str]:
    at = 0
    for _ in range(most + 1):  # one more shows that there are too many
        if at >= len(data):
            return
        end = at + _LENGTH_BYTES + int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        if at + _LENGTH_BYTES > len(data) or end > len(data):
            raise ServingError(f"input {name!r} ends within an element", 400)
        try:
            yield bytes(data[at + _LENGTH_BYTES : end]).decode()
        except UnicodeDecodeError as err:
            raise ServingError(
                f"input {name!r} holds an element that is not UTF-8, as ONNX strings must be", 400
            ) from err
        at = end
