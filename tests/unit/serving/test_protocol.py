"""The protocol's requests and tensors: what is read, what is written, and what is refused."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx_ort import DType, ServingError
from rlx_ort.serving import protocol
from rlx_ort.serving.protocol import (
    InferRequest,
    WantedOutput,
    answer,
    array_from_bytes,
    bytes_of,
    parse_request,
)


def parsed(document: Any, binary: bytes = b"") -> InferRequest:
    """Return the request of a document with binary data behind it."""
    text = json.dumps(document).encode()
    return parse_request(memoryview(text + binary), len(text) if binary else None)


def one_input(**fields: Any) -> dict[str, Any]:
    """Return a document with one input of two floats, changed by the fields."""
    return {"inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2.5], **fields}]}


def test_json_data_becomes_an_array() -> None:
    """Flat and nested lists are the same."""
    for data in ([1, 2, 3, 4], [[1, 2], [3, 4]]):
        found = parsed(one_input(shape=[2, 2], data=data)).inputs["x"]
        assert found.dtype == np.float32
        assert found.tolist() == [[1, 2], [3, 4]]


def test_texts_travel_with_their_length() -> None:
    """Four bytes, little-endian, before each element: Triton's form of BYTES."""
    array = np.array(["", "ä€", "x" * 300], object)
    data = bytes_of(array)
    assert data[:6] == b"\0\0\0\0\5\0"
    assert array_from_bytes("x", (3,), DType.STRING, memoryview(data)).tolist() == array.tolist()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not a JSON object"),
        ({}, "not a list of objects"),
        ({"inputs": [1]}, "not a list of objects"),
        (one_input(name=""), "has no name"),
        (one_input(shape=[3]), "2 elements"),
        (one_input(shape=[-1]), "not a list of sizes"),
        (one_input(shape=[True, 2]), "not a list of sizes"),
        (one_input(shape="22"), "not a list of sizes"),
        (one_input(datatype="FP31"), "known: BOOL"),
        (one_input(data=[1, "a"]), "other JSON values"),
        (one_input(data=[1, None]), "other JSON values"),
        (one_input(data=5), "not a list"),
        (one_input(data=[1, 1e300]), "beyond FP32"),
        (one_input(datatype="FP64", data=[1, 10**400]), "does not fit FP64"),
        (one_input(datatype="BYTES", data=["a", "\ud800"]), "does not fit BYTES"),
        (one_input(shape=[0, 1 << 39], data=[]), "outputs of any size"),
        (one_input(shape=[1 << 39, 1 << 39, 0], data=[]), "outputs of any size"),
        (one_input(datatype="UINT8", data=[1, 256]), "does not fit UINT8"),
        (one_input(datatype="INT64", data=[1, 2.5]), "other JSON values"),
        (one_input(datatype="INT64", data=[1, 1 << 80]), "does not fit INT64"),
        (one_input(datatype="BOOL", data=[1, 0]), "other JSON values"),
        (one_input(datatype="BYTES", data=["a", 1]), "other JSON values"),
        (one_input(parameters={"binary_data_size": 8}), "both data and"),
        (one_input(parameters=3), "not an object"),
        (one_input(parameters={"shared_memory_region": "r"}), "never reads"),
        ({"inputs": [*one_input()["inputs"]] * 2}, "given twice"),
        ({**one_input(), "id": 3}, "not a text"),
        ({**one_input(), "parameters": {"sequence_id": 3}}, "stateful"),
        ({**one_input(), "parameters": {"priority": -1}}, "whole number"),
        ({**one_input(), "parameters": {"binary_data_output": 1}}, "not true or false"),
        ({**one_input(), "outputs": [{"name": "y"}, {"name": "y"}]}, "asked for twice"),
        ({**one_input(), "outputs": [{"name": "y", "parameters": {"classification": 3}}]}, "not supported"),
    ],
)
def test_what_is_no_request_is_refused(document: Any, message: str) -> None:
    """Status 400, with what was found."""
    with pytest.raises(ServingError, match=message) as caught:
        parsed(document)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"id": NaN}', b'{"id": -Infinity}', b'{"id": 1, "id": 2}',
        b'{"inputs": [{"name": "x", "name": "y"}]}', b'{"id": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_json_is_refused(text: bytes) -> None:
    """Cut, binary and deeply nested text, keys given twice, and numbers that JSON does not have."""
    with pytest.raises(ServingError, match="not JSON"):
        parse_request(memoryview(text), None)


@pytest.mark.parametrize(
    ("fields", "binary", "message"),
    [
        ({"parameters": {"binary_data_size": 9}}, b"12345678", "8 bytes are left"),
        ({"parameters": {"binary_data_size": 4}}, b"12345678", "4 bytes"),
        ({"parameters": {"binary_data_size": True}}, b"1", "bytes are left"),
        ({"parameters": {"binary_data_size": 8}}, b"123456789", "belong to no input"),
        ({"datatype": "BYTES", "parameters": {"binary_data_size": 6}}, b"\4\0\0\0ab", "within an element"),
        ({"datatype": "BYTES", "parameters": {"binary_data_size": 5}}, b"\1\0\0\0\xff", "not UTF-8"),
        ({"datatype": "BYTES", "parameters": {"binary_data_size": 5}}, b"\1\0\0\0a", "1 elements"),
    ],
)
def test_binary_data_that_does_not_fit_is_refused(fields: Mapping[str, Any], binary: bytes, message: str) -> None:
    """Sizes that are not those of the type and shape."""
    document = one_input(**fields)
    del document["inputs"][0]["data"]
    with pytest.raises(ServingError, match=message):
        parsed(document, binary)


def test_an_answer_has_json_and_binary_outputs_side_by_side() -> None:
    """The binary parts are behind the JSON, in the order of the outputs, with their sizes in it."""
    request = InferRequest({}, (WantedOutput("a", True), WantedOutput("b")), id="7")
    outputs = {"a": np.array([1, 2], np.int16), "b": np.array(["x"], object), "c": np.zeros(1)}
    head, parts = answer(request, "m", "3", outputs, {"a": "INT16", "b": "BYTES", "c": "FP64"})
    assert json.loads(head) == {
        "model_name": "m",
        "model_version": "3",
        "id": "7",
        "outputs": [
            {"name": "a", "datatype": "INT16", "shape": [2], "parameters": {"binary_data_size": 4}},
            {"name": "b", "datatype": "BYTES", "shape": [1], "data": ["x"]},
        ],
    }
    assert parts == [b"\1\0\2\0"]


def test_json_carries_bfloat16_and_refuses_nan() -> None:
    """Numbers as JSON has them; NaN is no JSON."""
    request = InferRequest({})
    head, _ = answer(request, "m", "1", {"y": np.array([1.5], ml_dtypes.bfloat16)}, {"y": "BF16"})
    assert json.loads(head)["outputs"][0]["data"] == [1.5]
    with pytest.raises(ServingError, match="ask for binary"):
        answer(request, "m", "1", {"y": np.array([np.nan], np.float32)}, {"y": "FP32"})


def test_large_json_is_read_as_small_json_is() -> None:
    """Its numbers go through other functions, and its elements are converted in pieces."""
    numbers = [(at % 1000) / 8 if at % 3 else at for at in range(50_000)]
    tensor = {"name": "x", "shape": [25_000, 2], "datatype": "FP32", "data": numbers}
    found = parse_request(memoryview(json.dumps({"inputs": [tensor]}).encode()), None)
    np.testing.assert_array_equal(found.inputs["x"], np.array(numbers, np.float32).reshape(-1, 2))
    tensor["data"] = [*numbers[:-1], True]
    with pytest.raises(ServingError, match="other JSON values"):
        parse_request(memoryview(json.dumps({"inputs": [tensor]}).encode()), None)


def test_large_answers_are_written_as_small_ones_are() -> None:
    """In pieces, of which JSON shows nothing."""
    numbers = np.arange(100_000, dtype=np.float32) / 8
    head, _ = answer(InferRequest({}), "m", "1", {"y": numbers}, {"y": "FP32"})
    assert json.loads(head)["outputs"][0]["data"] == numbers.tolist()


def test_other_threads_run_while_large_json_is_read() -> None:
    """The event loop among them: the interpreter lock is let go all the time."""
    count = 300_000
    data = json.dumps({"inputs": [{"name": "x", "shape": [count], "datatype": "FP64", "data": [0.5] * count}]})
    turns, ended = 0, threading.Event()

    def read() -> None:
        parse_request(memoryview(data.encode()), None)
        ended.set()

    thread = threading.Thread(target=read)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    try:
        thread.start()
        while not ended.is_set():
            time.sleep(0.0001)  # waiting for an event rounds up to the clock of Windows, 16 ms
            turns += 1
    finally:
        sys.setswitchinterval(interval_s)
        thread.join()
    assert turns > 5  # 28 on an idle machine, and one where the lock is held


@pytest.mark.parametrize(
    ("datatype", "data", "message"),
    [("FP32", "[],", r"times \["), ("BYTES", '"",', 'times "')],
)
def test_what_takes_the_parser_long_is_refused_before(datatype: str, data: str, message: str) -> None:
    """Lists and texts are made while other threads wait."""
    head = f'{{"inputs": [{{"name": "x", "shape": [1], "datatype": "{datatype}", "data": ['
    body = (head + data * 1_100_000 + '""]}]}').encode()
    with pytest.raises(ServingError, match=message) as refused:
        parse_request(memoryview(body), None)
    assert refused.value.status == 413


def test_memory_is_asked_for_before_a_request_is_decoded() -> None:
    """For large JSON, and for texts by their number; numbers as binary data share the body's memory."""
    taken: list[int] = []
    head = b'{"inputs":[{"name":"x","shape":[%d],"datatype":"%s","parameters":{"binary_data_size":%d}}]}'
    texts = head % (1000, b"BYTES", 6000)
    parse_request(memoryview(texts + b"\x02\0\0\0ab" * 1000), len(texts), taken.append)
    assert taken == [1000 * protocol.TEXT_BYTES + 6000]
    taken.clear()
    numbers = head % (1000, b"FP32", 4000)
    parse_request(memoryview(numbers + bytes(4000)), len(numbers), taken.append)
    assert taken == []
    body = json.dumps({"inputs": [{"name": "x", "shape": [40_000], "datatype": "INT8", "data": [1] * 40_000}]}).encode()
    parse_request(memoryview(body), None, taken.append)
    assert taken == [protocol.JSON_FACTOR * len(body)]
