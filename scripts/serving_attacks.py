"""Attacks `rlx-ort serve` in a child process: thousands of malformed requests, and clients that ask for much.

```
python scripts/serving_attacks.py --count 10000 --seed 1
python scripts/serving_attacks.py --attacks streams,json -- --most-held-bytes 268435456
```

`malformed`: meanwhile good clients ask without a pause, and slow ones hold connections open. The exit code is 1 if the
server ends, answers with another status than expected, fails one good request, or holds more than 50 MiB more than
after the first tenth of the attacks.

The other attacks have a line of JSON each: the server's peak memory, and what health checks over new connections took
meanwhile, asked in a process of its own. `none` shows the noise of the machine. The exit code is 1 if the server ends
or does not answer a check.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import grpc
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from served_attacks import answers, ask, request, run  # noqa: E402  # files of the tests
from served_models import save_product, started_command  # noqa: E402
from served_pressure import (  # noqa: E402
    COLUMNS,
    INFER,
    OPTIONS,
    WIDTH,
    UnreadCall,
    binary_request,
    connected,
    infer_path,
    save_models,
    unread_streams,
    wide_message,
)

from rlx_ort.serving.messages import messages  # noqa: E402

_MOST_GROWTH = 50 << 20
_MALFORMED = "malformed"
_SAMPLED_S = 0.02
_LARGE = 57 << 20
_ROWS = _LARGE // WIDTH // 4
_PROBE = """
import json, socket, sys, time
host, port = sys.argv[1].rsplit(":", 1)
ask = b"GET /v2/health/live HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n"
print("asking", flush=True)
times, failed, until = [], 0, None
sys.stdin.reconfigure(line_buffering=True)
import threading
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
while not ended.is_set():
    begun = time.perf_counter()
    try:
        with socket.create_connection((host, int(port)), 30) as connection:
            connection.sendall(ask)
            found = b""
            while piece := connection.recv(1000):
                found += piece
        failed += b" 200 " not in found[:20]
    except OSError:
        failed += 1
    times.append(time.perf_counter() - begun)
    time.sleep(0.01)
print(json.dumps({"asked": len(times), "failed": failed, "worst_ms": round(max(times) * 1e3, 1),
                  "p99_ms": round(sorted(times)[len(times) * 99 // 100] * 1e3, 1),
                  "median_ms": round(sorted(times)[len(times) // 2] * 1e3, 2)}))
"""


def _ask(http: str, rpc: str, ended: threading.Event, counts: Counter[str], defects: list[str]) -> None:
    """Ask on both sides until the end, and note every request that is not answered rightly."""
    while not ended.is_set():
        try:
            if not answers(http, rpc):
                defects.append("a good request got a wrong answer during the attacks")
        except (OSError, grpc.RpcError) as err:
            defects.append(f"a good request failed during the attacks: {err!r}")
        counts["good requests, of other clients"] += 2


def _trickle(http: str, most: int, ended: threading.Event, counts: Counter[str]) -> None:
    """Hold connections whose requests come byte by byte; those that the server closes are opened again."""
    host, _, port = http.rpartition(":")
    text = request(b"{" * 1000)
    held: dict[socket.socket, int] = {}
    while not ended.wait(0.2):
        for connection, sent in list(held.items()):
            try:
                connection.sendall(text[sent : sent + 1])
                held[connection] = sent + 1
            except OSError:
                connection.close()
                del held[connection]
                counts["slow connections that were closed"] += 1
        while len(held) < most:
            held[socket.create_connection((host, int(port)), 10)] = 0
    for connection in held:
        connection.close()


class _Peak(threading.Thread):
    """Samples the memory of a process."""

    def __init__(self, process: psutil.Process) -> None:
        super().__init__(daemon=True)
        self._process, self._ended = process, threading.Event()
        self.bytes = self.before_bytes = process.memory_info().rss

    def run(self) -> None:
        with contextlib.suppress(psutil.Error):
            while not self._ended.wait(_SAMPLED_S):
                self.bytes = max(self.bytes, self._process.memory_info().rss)

    def end(self) -> None:
        self._ended.set()
        self.join()


@contextlib.contextmanager
def _probed(http: str, found: dict[str, object]) -> Iterator[None]:
    probe = subprocess.Popen(
        [sys.executable, "-c", _PROBE, http], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert probe.stdin is not None
    assert probe.stdout is not None
    probe.stdout.readline()
    try:
        yield
    finally:
        probe.stdin.write("\n")
        probe.stdin.flush()
        found |= json.loads(probe.stdout.readline())
        probe.wait(10)


def measured(name: str, attack: Callable[[str, str], str], arguments: list[str]) -> dict[str, object]:
    """Return what an attack on a fresh server costs."""
    found: dict[str, object] = {"attack": name}
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder))
        process, http, rpc = started_command([folder, "--device", "cpu", *arguments])
        peak = _Peak(psutil.Process(process.pid))
        peak.start()
        begun = time.perf_counter()
        try:
            with _probed(http, found):
                found["answers"] = attack(http, rpc)
                found["took_s"] = round(time.perf_counter() - begun, 1)
            peak.end()
            found["peak_mib"], found["before_mib"] = peak.bytes >> 20, peak.before_bytes >> 20
            found["alive"] = process.poll() is None
        finally:
            process.terminate()
            try:
                found["exit"] = process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                found["exit"] = "killed"
    return found


def json_request(numbers: int) -> bytes:
    """Return an HTTP request with so many numbers as JSON."""
    head = json.dumps({"inputs": [{"name": "x", "shape": [numbers // 2, 2], "datatype": "FP32", "data": 0}]})
    data = "[" + ",".join(str(at % 10) + ".5" for at in range(numbers)) + "]"
    return request(head.replace('"data": 0', f'"data": {data}').encode(), path=infer_path("echo_fp32"))


def texts(total_bytes: int, each_bytes: int) -> tuple[int, bytes]:
    """Return how many texts there are in binary data of about such a size, an even number, and the data."""
    one = each_bytes.to_bytes(4, "little")
    count = total_bytes // (4 + each_bytes) // 2 * 2
    return count, b"".join(one + (b"%0*d" % (each_bytes, at))[-each_bytes:] for at in range(count))


def _together(calls: Sequence[Callable[[], str]]) -> str:
    """Make calls in threads, and return how often each result came."""
    found = Counter[str]()

    def one(call: Callable[[], str]) -> None:
        try:
            found[call()] += 1
        except (OSError, grpc.RpcError) as err:
            code = err.code().name if isinstance(err, grpc.RpcError) else type(err).__name__
            found[code] += 1

    threads = [threading.Thread(target=one, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ", ".join(f"{count} x {key}" for key, count in sorted(found.items()))


def _asked(http: str, data: bytes) -> Callable[[], str]:
    return lambda: str(ask(http, data, timeout_s=120)[0])


def _called(rpc: str, data: bytes, timeout_s: float = 120) -> Callable[[], str]:
    def call() -> str:
        with grpc.insecure_channel(rpc, options=OPTIONS) as channel:
            channel.unary_unary(INFER)(data, timeout=timeout_s)
        return "OK"

    return call


def unread_calls(rpc: str, calls: int, rows: int = 216, wait_s: float = 15) -> str:
    """Make gRPC calls over connections whose client reads nothing."""
    host, _, port = rpc.rpartition(":")
    held = [UnreadCall(host, int(port), wide_message(rows)) for _ in range(calls)]
    time.sleep(wait_s)
    for each in held:
        each.close()
    return f"{calls} calls left unread"


def unread_answers(http: str, clients: int = 200, rows: int = 216, wait_s: float = 15) -> str:
    """Ask over HTTP for large answers, and read none."""
    data = binary_request("wide", [rows, COLUMNS], "FP32", bytes(4 * rows * COLUMNS))
    held = [connected(http, data, 4096) for _ in range(clients)]
    time.sleep(wait_s)
    for each in held:
        each.close()
    return f"{clients} answers left unread"


def slow_bodies(http: str, clients: int = 1000, wait_s: float = 15) -> str:
    """Hold connections whose bodies do not end, and ask meanwhile as another client."""
    head = request(b"", path=infer_path("echo_fp32"), length=str(1 << 20))
    good = request(
        json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}).encode(),
        path=infer_path("echo_fp32"),
    )
    held, answers, until = [], Counter[int](), time.monotonic() + wait_s
    with contextlib.suppress(OSError):
        held += [connected(http, head + b" ") for _ in range(clients)]
    while time.monotonic() < until:
        try:
            answers[ask(http, good)[0]] += 1
        except OSError:
            answers[0] += 1
        for each in held:
            with contextlib.suppress(OSError):
                each.send(b" ")
        time.sleep(0.1)
    for each in held:
        each.close()
    return ", ".join(f"{count} x {key}" for key, count in sorted(answers.items()))


def large_bodies(http: str, clients: int = 40) -> str:
    """Send nearly all of large bodies, and hold them."""
    head = request(b"", path=infer_path("echo_fp32"), length=str(_LARGE))
    body = bytes(_LARGE - 1)

    def one() -> str:
        with connected(http, head) as connection:
            try:
                connection.sendall(body)
                connection.settimeout(20)
                return str(connection.recv(100).split()[1:2])
            except TimeoutError:
                return "held"

    return _together([one] * clients)


def _text_requests(each_bytes: int) -> bytes:
    count, data = texts(_LARGE, each_bytes)
    return binary_request("echo_bytes", [count // 2, 2], "BYTES", data)


def _infer_message(model: str, shape: Sequence[int], datatype: str, raw: bytes) -> bytes:
    found = messages.ModelInferRequest(model_name=model)
    found.inputs.add(name="x", datatype=datatype, shape=shape)
    found.raw_input_contents.append(raw)
    data: bytes = found.SerializeToString()
    return data


def _text_message(each_bytes: int) -> bytes:
    count, data = texts(_LARGE, each_bytes)
    return _infer_message("echo_bytes", [count // 2, 2], "BYTES", data)


def _contents_message() -> bytes:
    found = messages.ModelInferRequest(model_name="echo_fp32")
    tensor = found.inputs.add(name="x", datatype="FP32", shape=[2_000_000, 2])
    tensor.contents.fp32_contents.extend([0.5] * 4_000_000)
    data: bytes = found.SerializeToString()
    return data


def _parameters_message(count: int = 1_000_000) -> bytes:
    found = messages.ModelInferRequest(model_name="echo_fp32")
    for at in range(count):
        found.parameters[f"p{at}"].int64_param = at
    data: bytes = found.SerializeToString()
    return data


ATTACKS: Mapping[str, Callable[[str, str], str]] = {
    "none": lambda http, rpc: time.sleep(5) or "",
    "streams": lambda http, rpc: unread_streams(rpc),
    "calls": lambda http, rpc: unread_calls(rpc, 200),
    "answers": lambda http, rpc: unread_answers(http),
    "numbers": lambda http, rpc: _together(
        [_asked(http, binary_request("rows", [_ROWS, WIDTH], "FP32", bytes(4 * _ROWS * WIDTH)))] * 4
    ),
    "grpc-numbers": lambda http, rpc: _together(
        [_called(rpc, _infer_message("rows", [_ROWS, WIDTH], "FP32", bytes(4 * _ROWS * WIDTH)))] * 4
    ),
    "texts": lambda http, rpc: _together([_asked(http, _text_requests(2))] * 2),
    "long-texts": lambda http, rpc: _together([_asked(http, _text_requests(60))] * 2),
    "grpc-texts": lambda http, rpc: _together([_called(rpc, _text_message(2))] * 2),
    "json": lambda http, rpc: _together([_asked(http, json_request(2_000_000))] * 4),
    "json-nested": lambda http, rpc: _together(
        [_asked(http, request(b"[" + b"[],[]," * (4 << 18) + b"1]", path=infer_path("echo_fp32")))] * 4
    ),
    "contents": lambda http, rpc: _together([_called(rpc, _contents_message())] * 4),
    "parameters": lambda http, rpc: _together([_called(rpc, _parameters_message())] * 4),
    "empty-inputs": lambda http, rpc: _together([_called(rpc, b"\x2a\x00" * (_LARGE // 2))] * 2),
    "slow-bodies": lambda http, rpc: slow_bodies(http),
    "large-bodies": lambda http, rpc: large_bodies(http),
}
"""What each attack is called, and the attack itself on the addresses for HTTP and gRPC; it returns what came back."""


def main() -> int:
    """Attack servers, print what came of it, and return the exit code."""
    names = [_MALFORMED, *ATTACKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", default=_MALFORMED, help=f"all, or of {', '.join(names)}")
    parser.add_argument("arguments", nargs="*", help="further options of `rlx-ort serve`, behind --")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=2, help="good clients at the same time")
    parser.add_argument("--slow", type=int, default=200, help="slow connections at the same time")
    args = parser.parse_args()
    failed = 0
    for name in names if args.attacks == "all" else args.attacks.split(","):
        if name == _MALFORMED:
            failed |= malformed(args)
            continue
        found = measured(name, ATTACKS[name], args.arguments)
        print(json.dumps(found), flush=True)
        failed |= bool(found["failed"]) or not found["alive"]
    return int(failed)


def malformed(args: argparse.Namespace) -> int:
    """Send malformed requests, print counts, and return 1 if there is a defect."""
    counts, defects = Counter[str](), list[str]()
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        save_product(Path(folder) / "product.onnx")
        process, http, rpc = started_command([folder, "--device", "cpu", "--most-bytes", str(4 << 20)])
        memory = psutil.Process(process.pid)
        sizes = []
        good = [threading.Thread(target=_ask, args=(http, rpc, ended, counts, defects)) for _ in range(args.clients)]
        slow = threading.Thread(target=_trickle, args=(http, args.slow, ended, counts))
        for thread in (*good, slow):
            thread.start()
        for part in range(10):
            found, wrong = run(http, rpc, args.count // 10, args.seed * 1000 + part)
            counts += found
            defects += wrong
            sizes.append(memory.memory_info().rss)
            print(f"{(part + 1) * 10} %: {sizes[-1] >> 20} MiB, {len(defects)} defects", flush=True)
        ended.set()
        for thread in (*good, slow):
            thread.join()
        if not answers(http, rpc):
            defects.append("a good request is not answered")
        process.terminate()
        if (code := process.wait(60)) != 0 and sys.platform != "win32":
            defects.append(f"exit code {code}")
    if sizes[-1] - sizes[0] > _MOST_GROWTH:
        defects.append(f"memory grew from {sizes[0] >> 20} to {sizes[-1] >> 20} MiB")
    for title, count in sorted(counts.items()):
        print(f"{count:7} {title}")
    for text in defects[:50]:
        print(text)
    return 1 if defects else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.SubprocessError as err:
        sys.exit(f"the server did not start: {err}")
