"""Keep the figures of `bench.py` as a series over time, and draw it.

    python scripts/bench.py --json | python scripts/series.py add     append a run; prints what became slower
    python scripts/series.py plot                                     draw docs/results/series.svg; needs matplotlib

A line of docs/results/series.jsonl is one run: date, commit, machine, versions, and by family the value, unit and
target of each figure. Figures are compared with the last run of the same machine only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SERIES = ROOT / "docs" / "results" / "series.jsonl"
PICTURE = SERIES.with_suffix(".svg")
SLOWER = 1.05
"""How far a figure may be above that of the run before."""
LEAST = 0.1
"""Shares of a target below this are drawn here; values of 0 and below have no logarithm."""


@dataclass(frozen=True)
class Run:
    """One run of the bench.

    Attributes:
        date: the day, as in `2026-11-22`.
        commit: what was measured.
        machine: processor, number of cores and GPU; runs are compared where this is equal.
        versions: package -> version.
        figures: family -> figure -> value, unit and target; the target is None where there is none.
    """

    date: str
    commit: str
    machine: str
    versions: dict[str, str]
    figures: dict[str, dict[str, list[Any]]] = field(default_factory=dict)


def main() -> int:
    """Append a run or draw the series; return 1 where a figure of an appended run misses its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=("add", "plot"))
    parser.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat())
    parser.add_argument("--commit", help="what was measured; the checkout's commit by default")
    parser.add_argument("--gpu", default="", help="the GPU, as a part of the machine's name")
    options = parser.parse_args()
    known = read(SERIES)
    if options.job == "plot":
        plot(known, PICTURE)
        return 0
    added = run_of(sys.stdin, options.date, options.commit or _commit(), options.gpu)
    with SERIES.open("a", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(asdict(added)) + "\n")
    missed = False
    last = {key: value for run in known if run.machine == added.machine for key, value, _ in _measured(run)}
    for key, value, target in _measured(added):
        if last.get(key, 0) > 0 and value / last[key] > SLOWER:
            print(f"{value / last[key]:.2f} of the run before: {key}")
        if target is not None and value > target:
            print(f"missed its target, {value:.4g} > {target:g}: {key}")
            missed = True
    return int(missed)


def read(path: Path) -> list[Run]:
    """Return the runs of a series, oldest first; none where there is no file."""
    if not path.exists():
        return []
    return [Run(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def run_of(lines: Iterable[str], date: str, commit: str, gpu: str = "") -> Run:
    """Return the run that `bench.py --json` printed: the machine first, then a figure a line."""
    first, *figures = [json.loads(line) for line in lines if line.strip()]
    machine = ", ".join(filter(None, (first["processor"], f"{first['cores']} cores", gpu)))
    versions = {name: first[name] for name in ("python", "onnxruntime", "onnx", "numpy")}
    run = Run(date, commit, machine, versions)
    for row in figures:
        value = float(f"{row['value']:.4g}")
        run.figures.setdefault(row["family"], {})[row["figure"]] = [value, row["unit"], row["target"]]
    return run


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draw each figure that has a target as a row of dots, its runs from light to dark, by its share of the target."""
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure

    machines = list(dict.fromkeys(run.machine for run in runs))
    rows = {machine: _rows([run for run in runs if run.machine == machine]) for machine in machines}
    heights = [len(found) + 2 for found in rows.values()]
    picture = Figure(figsize=(12, 0.22 * sum(heights) + 1), layout="constrained")
    panels = picture.subplots(len(machines), 1, squeeze=False, height_ratios=heights, sharex=True)[:, 0]
    for panel, (machine, found) in zip(panels, rows.items(), strict=True):
        for place, shares in enumerate(found.values()):
            colors = [colormaps["Blues"](0.25 + 0.75 * (at + 1) / len(shares)) for at in range(len(shares))]
            panel.scatter([max(share, LEAST) for share in shares], [place] * len(shares), c=colors, s=28, zorder=3)
        panel.axvline(1, color="firebrick", linewidth=1)
        panel.set_yticks(range(len(found)), list(found), fontsize=7)
        panel.set_ylim(len(found) - 0.5, -0.5)
        panel.set_xscale("log")
        panel.grid(axis="both", color="0.9", linewidth=0.6)
        panel.set_title(machine, fontsize=9, loc="left")
    panels[-1].set_xlabel("measured / target; left of the line is met, dark is new")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "series"}):  # text as text, and the same file each time
        picture.savefig(path, metadata={"Date": None})


def _rows(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Return figure -> share of its present target in each run, for the figures of each family's latest run."""
    found: dict[str, list[float]] = {}
    for family in dict.fromkeys(family for run in runs for family in run.figures):
        having = [run.figures[family] for run in runs if family in run.figures]
        for name, (_, _, target) in having[-1].items():
            if target:
                label = f"{family}: {name}"
                found[label if len(label) < 100 else label[:97] + "..."] = [
                    figures[name][0] / target for figures in having if name in figures
                ]
    return found


def _measured(run: Run) -> Iterator[tuple[str, float, float | None]]:
    """Yield family and figure as one text, the value, and the target."""
    for family, figures in run.figures.items():
        for name, (value, _, target) in figures.items():
            yield f"{family}: {name}", value, target


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
