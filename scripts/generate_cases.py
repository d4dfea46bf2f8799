#!/usr/bin/env python
"""Generate graphs, run them in every way on a device, and compare with the float64 reference.

    python scripts/generate_cases.py --device cpu --minutes 10
    python scripts/generate_cases.py --device webgpu --cases 20000 --failures failures.json

A case is one graph in one way at one size. Each verdict is equal, refused (a typed error), unjudged (the reference has
no answer), WRONG, UNTYPED (another error) or CRASH (the process died). Exits with 1 if any of the last three is not
listed in `tests/data/generated/known.toml`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from generated.runs import Report, run_cases

_ROUND_S = 30.0


def main() -> int:
    """Run rounds until the time or the number of cases is reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="the device, by default cpu")
    parser.add_argument("--minutes", type=float, default=1.0, help="the longest time to run, by default 1")
    parser.add_argument("--cases", type=int, default=10**12, help="the number of cases to stop at")
    parser.add_argument("--graphs", type=int, default=10**12, help="the number of graphs to stop at")
    parser.add_argument("--first", type=int, help="the first seed, by default one of the clock")
    parser.add_argument("--failures", type=Path, help="a file to write the failures to, as JSON")
    parser.add_argument("--keep-sources", action="store_true", help="leave the arrays that graphs were made from alone")
    parser.add_argument(
        "--one", type=json.loads, help="the steps, outputs and ways of one graph, as failures name them"
    )
    given = parser.parse_args()
    total, end = Report(), time.monotonic() + given.minutes * 60
    seed = int(time.time() * 1000) % 2**48 if given.first is None else given.first
    while (left := end - time.monotonic()) > 0 and total.cases < given.cases and total.graphs < given.graphs:
        found = run_cases(
            given.device,
            first=seed,
            graphs=given.graphs - total.graphs,
            seconds=min(left, _ROUND_S),
            one=given.one,
            keep_sources=given.keep_sources,
        )
        seed += found.graphs
        total.graphs += found.graphs
        total.counts += found.counts
        total.failures += found.failures
        total.known += found.known
        total.seconds += found.seconds
        if given.failures:
            given.failures.write_text(json.dumps([f.as_dict() for f in total.failures], indent=1), encoding="utf-8")
    print(total)
    return 1 if total.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
