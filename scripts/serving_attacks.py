"""Sends thousands of malformed requests to `rlx-ort serve` in a child process, and watches answers and memory.

```
python scripts/serving_attacks.py --count 10000 --seed 1
```

The exit code is 1 if the server ends, answers with another status than expected, fails a good request afterwards, or
holds more than 50 MiB more than after the first tenth of the attacks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from served_attacks import answers, run  # noqa: E402  # a file of the tests
from served_models import save_product, started_command  # noqa: E402

_MOST_GROWTH = 50 << 20


def main() -> int:
    """Attack a server, print counts, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    counts, defects = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        save_product(Path(folder) / "product.onnx")
        process, http, rpc = started_command([folder, "--device", "cpu", "--most-bytes", str(4 << 20)])
        memory = psutil.Process(process.pid)
        sizes = []
        for part in range(10):
            found, wrong = run(http, rpc, args.count // 10, args.seed * 1000 + part)
            counts += found
            defects += wrong
            sizes.append(memory.memory_info().rss)
            print(f"{(part + 1) * 10} %: {sizes[-1] >> 20} MiB, {len(defects)} defects", flush=True)
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
