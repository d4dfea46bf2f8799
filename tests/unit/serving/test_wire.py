"""Large gRPC messages in their wire format, against protobuf's own reading and writing of it."""

from __future__ import annotations

import struct

import pytest

pytest.importorskip("google.protobuf")

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # no types are shipped

from rlx_ort.errors import ServingError
from rlx_ort.serving import wire
from rlx_ort.serving.messages import messages


def _request() -> bytes:
    found = messages.ModelInferRequest(model_name="m", id="7")
    found.inputs.add(name="x", datatype="FP32", shape=[2, 300]).parameters["p"].int64_param = 3
    found.raw_input_contents.append(bytes(range(256)) * 4)
    found.inputs.add(name="y", datatype="INT64", shape=[1]).contents.int64_contents.extend([-1, 1 << 40])
    found.raw_input_contents.append(b"")
    data: bytes = found.SerializeToString()
    return data


def test_raw_contents_are_taken_out_of_a_request() -> None:
    """What is left is the same message without them, and they are in their order."""
    rest, raw = wire.split_request(_request())
    expected = messages.ModelInferRequest.FromString(_request())
    assert [bytes(each) for each in raw] == list(expected.raw_input_contents)
    del expected.raw_input_contents[:]
    assert messages.ModelInferRequest.FromString(rest) == expected
    wire.check_inputs(rest, 1 << 10)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 20_000])
def test_raw_outputs_are_those_of_the_message(size: int) -> None:
    """Also inside the message of a stream."""
    response = messages.ModelInferResponse(model_name="m")
    encoded = wire.nested(2, wire.with_raw_outputs(response, [b"x" * size, memoryview(b"ab")]))
    data = encoded.SerializeToString()
    assert len(encoded) == len(data)
    found = messages.ModelStreamInferResponse.FromString(data).infer_response
    assert found.model_name == "m"
    assert list(found.raw_output_contents) == [b"x" * size, b"ab"]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_message_that_is_cut_short_is_refused(cut: int) -> None:
    """Wherever it ends, it is refused or what arrived is whole."""
    data = _request()[:-cut]
    try:
        messages.ModelInferRequest.FromString(data)
    except DecodeError:
        with pytest.raises(ServingError, match="wire format"):
            wire.split_request(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x22\x00" * 5000, "4096 entries"),
        (b"\x2a\x00" * 5000, "4096 entries"),
        (b"\x2a\x82\x28" + b"\x22\x00" * 2561, ""),
        (b"\x2a\x82\x50" + b"\x22\x00" * 5121, "4096 entries"),
        (b"\x2a\x83\x08\x1a\x80\x08" + b"\x01" * 1024, "too many dims"),
        (b"\x2a\x86\x08\x2a\x83\x08\x1a\x80\x08" + b"\x01" * 1024, "whole numbers"),
    ],
    ids=["parameters", "inputs", "few of an input", "parameters of an input", "dims", "numbers"],
)
def test_entries_are_counted_before_they_are_decoded(data: bytes, message: str) -> None:
    """Each would take many times its bytes in memory."""
    if not message:
        wire.check_inputs(data, 1000)
        return
    with pytest.raises(ServingError, match=message):
        wire.check_inputs(wire.split_request(data)[0], 1000)


def test_a_long_size_is_read_whole() -> None:
    """A varint has up to ten bytes."""
    field = struct.pack("<B", 4 << 3) + b"\xff" * 9 + b"\x01"
    rest, raw = wire.split_request(field)
    assert (rest, raw) == (field, [])
