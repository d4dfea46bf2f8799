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
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import served_pressure  # noqa: E402  # a file of the tests
from served_attacks import answers, request, run  # noqa: E402
from served_models import save_product, started_command  # noqa: E402

_MOST_GROWTH = 50 << 20
_MALFORMED = "malformed"
_SAMPLED_S = 0.02
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
        served_pressure.save_models(Path(folder))
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


def main() -> int:
    """Attack servers, print what came of it, and return the exit code."""
    names = [_MALFORMED, *served_pressure.ATTACKS]
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
        found = measured(name, served_pressure.ATTACKS[name], args.arguments)
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
