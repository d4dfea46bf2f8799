"""Measure the project's figures on this machine, each beside its target.

    python scripts/bench.py            every figure
    python scripts/bench.py export     one family: a file of scripts/figures/, or scripts/serve_figures.py
    python scripts/bench.py overhead --json

Compared things run in turns in one process or in fresh processes of one run, so that a busy machine slows both.
With --json, one JSON object a line: the machine first, then the figures. The exit code is 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from figures.record import machine, show

FAMILIES = {
    name: f"figures.{name}_figures" for name in ("overhead", "export", "weights", "decode", "choose", "convert", "cuda")
} | {"serve": "serve_figures"}


def main() -> int:
    """Measure the families that the command line names and return 0 when every target is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"{', '.join(FAMILIES)}; all by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    options = parser.parse_args()
    unknown = set(options.families) - set(FAMILIES)
    if unknown:
        parser.error(f"unknown family {', '.join(sorted(unknown))}; known are {', '.join(FAMILIES)}")
    print(json.dumps(machine()) if options.json else "  ".join(f"{k}: {v}" for k, v in machine().items()), flush=True)
    missed = 0
    for family in options.families or FAMILIES:
        figures = importlib.import_module(FAMILIES[family]).measure()
        missed += show(figures, family, as_json=options.json)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
