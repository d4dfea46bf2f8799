"""Attacks `rlx-ort serve` in a child process with thousands of malformed requests.

    python scripts/serving_attacks.py --count 10000 --seed 1

Meanwhile good clients ask without a pause, and slow ones hold connections open. The exit code is 1 if the
server ends, answers with another status than expected, fails one good request, or holds more than 50 MiB more than
after the first tenth of the attacks.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import grpc
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from served_attacks import answers, request, run  # noqa: E402  # files of the tests
from served_models import save_product, started_command  # noqa: E402

_MOST_GROWTH = 50 << 20


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
    """Attack a server, print counts, and return 1 if there is a defect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=2, help="good clients at the same time")
    parser.add_argument("--slow", type=int, default=200, help="slow connections at the same time")
    args = parser.parse_args()
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


if __name__ == "__main__":
    sys.exit(main())
