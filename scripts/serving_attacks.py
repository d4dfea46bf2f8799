"""Attacks `rlx-ort serve` in a child process: thousands of malformed requests, and clients that ask for much.

```
python scripts/serving_attacks.py --count 10000 --seed 1
python scripts/serving_attacks.py --attacks streams,json -- --most-held-bytes 268435456
```

`malformed`: meanwhile good clients ask without a pause, and slow ones hold connections open. The exit code is 1 if the
server ends, answers with another status than expected, fails one good request, or holds more than 50 MiB more than
after the first tenth of the attacks.

The other attacks have a line of JSON each: the server's peak memory, and the time of health checks over new connections
meanwhile, asked in a process of its own. `none` shows the noise of the machine. The exit code is 1 if the server ends
or does not answer a check.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests" / "helpers")]

import served_pressure  # noqa: E402  # a file of the tests
from served_attacks import answers, request, run  # noqa: E402
from served_models import save_product, started_command  # noqa: E402

from figures.record import sampled  # noqa: E402

_MOST_GROWTH = 50 << 20
_MALFORMED = "malformed"
_SAMPLED_S, _PAUSE_S = 0.02, 0.01


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


def _probe(http: str, pipe: Any) -> None:
    """Check a server's health over new connections until something comes through a pipe, and send the times back."""
    host, _, port = http.rpartition(":")
    times, failed = [], 0
    pipe.send("asking")
    while not pipe.poll():
        begun = time.perf_counter()
        connection = HTTPConnection(host, int(port), timeout=30)
        try:
            connection.request("GET", "/v2/health/live")
            failed += connection.getresponse().status != 200
        except OSError:
            failed += 1
        finally:
            connection.close()
        times.append((time.perf_counter() - begun) * 1e3)
        time.sleep(_PAUSE_S)
    median, p99 = (round(sorted(times)[len(times) * percent // 100], 2) for percent in (50, 99))
    pipe.send(
        {"asked": len(times), "failed": failed, "worst_ms": round(max(times), 1), "p99_ms": p99, "median_ms": median}
    )


@contextlib.contextmanager
def _watched(http: str, pid: int, row: dict[str, Any]) -> Iterator[None]:
    """Check the health and sample the memory of a server during a block, and put the figures into a row."""
    memory, spawning = psutil.Process(pid), multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    probe = spawning.Process(target=_probe, args=(http, there))
    probe.start()
    here.recv()
    try:
        with sampled(lambda: memory.memory_info().rss if memory.is_running() else 0, _SAMPLED_S) as sizes:
            yield
    finally:
        here.send("end")
        row |= here.recv()
        probe.join(10)
        row["peak_mib"], row["before_mib"] = max(sizes) >> 20, sizes[0] >> 20


def measured(name: str, attack: Callable[[str, str], str], arguments: list[str]) -> dict[str, Any]:
    """Return the costs of an attack on a fresh server."""
    row: dict[str, Any] = {"attack": name}
    with tempfile.TemporaryDirectory() as folder:
        served_pressure.save_models(Path(folder))
        process, http, rpc = started_command([folder, "--device", "cpu", *arguments])
        begun = time.perf_counter()
        try:
            with _watched(http, process.pid, row):
                row["answers"] = attack(http, rpc)
                row["took_s"] = round(time.perf_counter() - begun, 1)
            row["alive"] = process.poll() is None
        finally:
            process.terminate()
            process.wait(40)
    return row


def malformed(args: argparse.Namespace) -> int:
    """Send malformed requests, print counts, and return 1 if there is a defect."""
    counts, defects, sizes = Counter[str](), list[str](), list[int]()
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        save_product(Path(folder) / "product.onnx")
        process, http, rpc = started_command([folder, "--device", "cpu", "--most-bytes", str(4 << 20)])
        threads = [threading.Thread(target=_ask, args=(http, rpc, ended, counts, defects)) for _ in range(args.clients)]
        threads.append(threading.Thread(target=_trickle, args=(http, args.slow, ended, counts)))
        for thread in threads:
            thread.start()
        for part in range(10):
            sent, wrong = run(http, rpc, args.count // 10, args.seed * 1000 + part)
            counts += sent
            defects += wrong
            sizes.append(psutil.Process(process.pid).memory_info().rss)
            print(f"{(part + 1) * 10} %: {sizes[-1] >> 20} MiB, {len(defects)} defects", flush=True)
        ended.set()
        for thread in threads:
            thread.join()
        if not answers(http, rpc):
            defects.append("a good request is not answered")
        process.terminate()
        if (code := process.wait(60)) != 0 and sys.platform != "win32":
            defects.append(f"exit code {code}")
    if sizes[-1] - sizes[0] > _MOST_GROWTH:
        defects.append(f"memory grew from {sizes[0] >> 20} to {sizes[-1] >> 20} MiB")
    print(*(f"{count:7} {title}" for title, count in sorted(counts.items())), *defects[:50], sep="\n")
    return int(bool(defects))


def main() -> int:
    """Attack servers, print the outcomes, and return the exit code."""
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
        row = measured(name, served_pressure.ATTACKS[name], args.arguments)
        print(json.dumps(row), flush=True)
        failed |= bool(row["failed"]) or not row["alive"]
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
