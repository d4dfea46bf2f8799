#!/usr/bin/env python
"""Generate graphs, run them in every way on a device, and compare with the float64 reference.

    python scripts/generate_cases.py --device cpu --minutes 10
    python scripts/generate_cases.py --device webgpu --cases 20000 --failures failures.json
    python scripts/generate_cases.py --models a.onnx b.onnx --minutes 5
    python scripts/generate_cases.py --plant all
    python scripts/generate_cases.py --choose --minutes 5
    python scripts/generate_cases.py --emptied --device webgpu

A case is one graph in one way at one size. Each verdict is equal, refused (a typed error), unjudged (the reference has
no answer), WRONG, UNTYPED (another error) or CRASH (the process died). Exits with 1 if any of the last three is not
listed in `tests/data/generated/known.toml`. With --emptied, the cases are those of ONNX's own suite with each dim of
each input 0 in turn. How to read a failure: `tests/generated/README.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from generated.faults import FAULTS, found_at
from generated.mutants import MODELS
from generated.runs import Report, chosen, run_cases
from onnx_suite.emptied import emptied_cases, verdicts

_ROUND_S = 30.0
_FAULT_S = 60.0


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
    parser.add_argument("--models", nargs="+", type=Path, help="ONNX files to change; only those are run")
    parser.add_argument("--plant", choices=["all", *FAULTS], help="measure how soon a fault is found that is planted")
    parser.add_argument("--choose", action="store_true", help="print few seeds that cover as much as all that were run")
    parser.add_argument("--one", type=json.loads, help="steps, outputs and ways of one graph, as failures name them")
    parser.add_argument("--emptied", action="store_true", help="run ONNX's own cases on tensors without elements")
    given = parser.parse_args()
    if given.emptied:
        counts, failures = verdicts(given.device, emptied_cases(each=True))
        print(*failures, dict(counts), sep="\n")
        return 1 if failures else 0
    seed = int(time.time() * 1000) % 2**48 if given.first is None else given.first
    if given.plant:
        return _plant([*FAULTS] if given.plant == "all" else [given.plant], seed)
    step = 1
    if given.models:
        os.environ[MODELS] = os.pathsep.join(str(path.resolve()) for path in given.models)
        seed, step = seed // 4 * 4 + 3, 4  # the seeds of changed models
    total, end = Report(given.device), time.monotonic() + given.minutes * 60
    print(f"from seed {seed}", flush=True)
    while (left := end - time.monotonic()) > 0 and total.cases < given.cases and total.graphs < given.graphs:
        count = min(given.graphs - total.graphs, 10**6)
        report = run_cases(
            given.device,
            range(seed, seed + step * count, step),
            seconds=min(left, _ROUND_S),
            one=given.one,
            keep_sources=given.keep_sources,
            failing=lambda text: print(text, flush=True),
        )
        seed += step * report.graphs
        total.add(report)
        print(f"{total.cases} cases in {total.seconds / 60:.1f} minutes, {len(total.failures)} failures", flush=True)
        if given.failures:
            given.failures.write_text(json.dumps([f.as_dict() for f in total.failures], indent=1), encoding="utf-8")
    print(total)
    if given.choose:
        print(f"seeds = {chosen(total.covered)}")
    return 1 if total.failures else 0


def _plant(names: list[str], first: int) -> int:
    """Print when each fault is found, in whatever way; return 1 if one is not found in time."""
    missed = 0
    for name in names:
        begun = time.monotonic()
        seed = found_at(name, first, _FAULT_S)
        missed += seed is None
        text = f"not found within {_FAULT_S:.0f} s" if seed is None else f"found by the graph of seed {seed}"
        print(f"{name}: {text}, after {time.monotonic() - begun:.1f} s", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
