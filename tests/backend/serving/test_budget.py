"""Clients that send much, or do not read their answers, share one budget over REST and gRPC with all others."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest
from fault_provider import until
from served_attacks import ask, request
from served_models import Served, serving
from served_pressure import (
    INFER,
    UnreadCall,
    binary_request,
    connected,
    infer_path,
    save_models,
    unread_streams,
    wide_message,
)

from rlx_ort.selection.policy import DevicePolicy
from rlx_ort.serving.options import ConnectionLimits, ServeOptions

MOST = 64 << 20
LIVE = request(b"", method="GET", path="/v2/health/live", length=None)
LARGE = 57 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server with a small budget, few connections, and little patience."""
    folder = tmp_path_factory.mktemp("pressed")
    save_models(folder)
    options = ServeOptions(policy=DevicePolicy.only("cpu"), most_held_bytes=MOST)
    with serving(folder, options, connections=ConnectionLimits(most=20, write_s=2.0)) as found:
        yield found


def held(served: Served) -> int:
    """Return the bytes that are held."""
    return served.repository.budget.held_bytes


def test_a_stream_whose_answers_are_not_read_is_not_asked_for_more(served: Served) -> None:
    """Of 64 requests for 14 MB each, few are run; the others wait at their client."""
    statistics = served.repository.find("wide").statistics
    before = statistics.inferences
    unread_streams(served.grpc, streams=1, wait_s=1)
    assert 1 <= statistics.inferences - before <= 4
    until(lambda: held(served) == 0)


def test_answers_that_are_not_read_count_and_are_given_up(served: Served) -> None:
    """Over HTTP: those that find no room get status 503; later all is free again."""
    data = binary_request("wide", [216, 64], "FP32", bytes(4 * 216 * 64))
    refused = served.repository.budget.refused
    unread = [connected(served.http, data, 4096) for _ in range(8)]
    until(lambda: served.repository.budget.refused > refused)
    assert MOST // 4 < held(served) <= MOST
    assert ask(served.http, LIVE)[0] == 200
    until(lambda: held(served) == 0)
    for connection in unread:
        connection.close()


def test_calls_whose_answers_are_not_read_leave_room_for_others(served: Served) -> None:
    """Over gRPC they count until their clients go away, and beside them REST goes on."""
    host, _, port = served.grpc.rpartition(":")
    refused = served.repository.budget.refused
    calls = [UnreadCall(host, int(port), wide_message(216)) for _ in range(4)]
    until(lambda: served.repository.budget.refused == refused + 3)
    until(lambda: MOST // 4 < held(served) <= MOST // 2)
    assert ask(served.http, binary_request("wide", [216, 64], "FP32", bytes(4 * 216 * 64)))[0] == 200
    assert held(served) > MOST // 4
    for call in calls:
        call.close()
    until(lambda: held(served) == 0)


def test_rest_and_grpc_share_the_budget(served: Served) -> None:
    """A body that arrives over HTTP takes the room of a gRPC call, whose refusal says when to try again."""
    head = request(b"", path=infer_path("echo_fp32"), length=str(LARGE))
    with connected(served.http, head + bytes(LARGE - 1)):
        until(lambda: held(served) >= LARGE - 1)
        with grpc.insecure_channel(served.grpc) as channel:
            call = channel.unary_unary(INFER)
            with pytest.raises(grpc.RpcError) as refused:
                call(wide_message(216), timeout=10)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(refused.value.trailing_metadata())["retry-after"] == "1"
    until(lambda: held(served) == 0)
    status, _ = ask(served.http, binary_request("wide", [216, 64], "FP32", bytes(4 * 216 * 64)))
    assert status == 200


def test_slow_bodies_leave_room_for_others(served: Served) -> None:
    """Beyond the limit of connections, the slowest client makes room, once it was waited for 0.5 s."""
    head = request(b"", path=infer_path("echo_fp32"), length="1000")
    slow = [connected(served.http, head + b" ") for _ in range(20)]
    try:
        begun = time.monotonic()
        until(lambda: ask(served.http, LIVE)[0] == 200)
        assert time.monotonic() - begun < 5
    finally:
        for connection in slow:
            connection.close()
