"""Measure the project's figures on this machine, each beside its target.

    python scripts/bench.py            every figure
    python scripts/bench.py model      one family: a file of scripts/figures/
    python scripts/bench.py import --json

Compared things run in turns in one process or in fresh processes of one run, so that a busy machine slows both.
With --json, one JSON object a line: the machine first, then the figures, as `series.py add` takes them. The exit code
is 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict

from figures.record import Figure, machine, shorten

FAMILIES = (
    *("import", "overhead", "threads", "export", "model", "weights", "decode", "choose", "convert", "package"),
    *("coldstart", "ask", "cuda", "serve"),
)


def main() -> int:
    """Measure the families that the command line names and return 0 when every target is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"{', '.join(FAMILIES)}; all by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--scale", type=float, default=1.0, help="length of soak and storm, 0.1 for a tenth")
    options = parser.parse_args()
    shorten(options.scale)
    unknown = set(options.families) - set(FAMILIES)
    if unknown:
        parser.error(f"unknown family {', '.join(sorted(unknown))}; known are {', '.join(FAMILIES)}")
    print(json.dumps(machine()) if options.json else "  ".join(f"{k}: {v}" for k, v in machine().items()), flush=True)
    missed = False
    for family in options.families or FAMILIES:
        for figure in importlib.import_module(f"figures.{family}_figures").measure():
            row = {"family": family, **asdict(figure), "ok": figure.ok}
            print(json.dumps(row) if options.json else _line(figure), flush=True)
            missed |= figure.ok is False
    return int(missed)


def _line(figure: Figure) -> str:
    target = "" if figure.target is None else f"  target <= {figure.target:g}"
    verdict = {True: "ok", False: "MISSED", None: "  "}[figure.ok]
    detail = f"  ({figure.detail})" if figure.detail else ""
    return f"{verdict:6}  {figure.figure}: {figure.value:.4g} {figure.unit}{target}{detail}"


if __name__ == "__main__":
    sys.exit(main())
