"""Measures what clients that ask for much cost a server: its peak memory and how long health checks of others take.

```
python scripts/serving_pressure.py
python scripts/serving_pressure.py --attacks streams,texts --most-held-bytes 268435456
```

Each attack has a server of its own. Another process asks for health over new connections all the time, which gives the
worst latency and how many checks failed. Without an attack (`none`) they show what the machine's noise is.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import served_pressure as pressure  # noqa: E402  # a file of the tests
from served_models import started_command  # noqa: E402

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
                  "median_ms": round(sorted(times)[len(times) // 2] * 1e3, 2)}))
"""


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
        pressure.save_models(Path(folder))
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


def main() -> None:
    """Print a line for each attack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attacks", default=",".join(pressure.ATTACKS), help="a list with commas")
    parser.add_argument("arguments", nargs="*", help="of `rlx-ort serve`, behind --")
    args = parser.parse_args()
    for name in args.attacks.split(","):
        print(json.dumps(measured(name, pressure.ATTACKS[name], args.arguments)), flush=True)


if __name__ == "__main__":
    main()
