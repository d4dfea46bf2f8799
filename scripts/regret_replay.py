"""Choose again for the kept runs over the graphs of regret_cases.py, by the cost model as it is and without its parts.

    python scripts/regret_replay.py                     the kept runs, and what each part of the model changes
    python scripts/regret_replay.py --table             every graph as well

Nothing is measured: the rows and the graphs' times come from docs/results/replay. A change of the model shows in
seconds on the same figures; a change of what is measured takes a new run. The exit code is 1 where the pooled regret or
error is above the limits below.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from regret_cases import cases

from rlx_ort.calibration import model
from rlx_ort.calibration.features import BY_WIDTH, Workload, workload_of
from rlx_ort.calibration.kernels import KERNELS, QUICK_PRIORITY
from rlx_ort.calibration.profile import CalibrationProfile, ProfileKey, Row
from rlx_ort.device import Device
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers.base import CostProfile
from rlx_ort.providers.hardware import core_share
from rlx_ort.providers.registry import provider_of
from rlx_ort.selection.cost import ProfileCostModel, total_ns
from rlx_ort.selection.support import model_for

_CORES = 16  # of the machines of the kept runs
KEPT = Path(__file__).parents[1] / "docs" / "results" / "replay"
LIMITS = {"regret": 1.023, "error": 0.125, "error_90": 0.44}
"""Geometric mean of the regrets, median and 90th percentile of the errors: the figures with which the model was merged,
and what they vary between runs."""

_DRAWS = 300


@dataclass(frozen=True)
class Outcome:
    """A case: its predicted and measured times in ns and the medians of its blocks, by device label, and the choice."""

    name: str
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    blocks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    chosen: str = ""

    @property
    def best(self) -> str:
        """The device that was measured the fastest."""
        return min(self.measured, key=lambda label: self.measured[label])

    def regret(self, label: str) -> float:
        """Return the time of a device over that of the best one; the worst measured one for a device without."""
        return self.measured.get(label, max(self.measured.values())) / self.measured[self.best]

    @property
    def noise(self) -> float:
        """The regret of the best device of one half of the blocks by the times of the other half."""
        halves = [
            {label: sorted(half)[len(half) // 4] for label, ns in self.blocks.items() if (half := ns[at::2])}
            for at in (0, 1)
        ]
        if not all(halves) or halves[0].keys() != halves[1].keys():
            return 1.0
        regrets = []
        for here, there in (halves, halves[::-1]):
            pick = min(here, key=lambda label: here[label])
            regrets.append(there[pick] / min(there.values()))
        return max(regrets)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return one line for each case: predicted and measured by device, the choice, and its cost."""
    labels = sorted({label for outcome in outcomes for label in outcome.predicted})
    head = f"{'graph':34}" + "".join(f"{label + ' us':>12}{'err':>7}" for label in labels)
    lines = [head + f"  {'chosen':8}{'best':8}{'regret':>7}{'noise':>7}"]
    for outcome in outcomes:
        cells = [f"{outcome.name:34}"]
        for label in labels:
            measured = outcome.measured.get(label)
            if measured is None:
                cells.append(f"{'skipped':>12}{'':7}")
            else:
                error = outcome.predicted.get(label, math.nan) / measured - 1
                cells.append(f"{measured / 1e3:12.1f}{error:+7.0%}")
        cells.append(f"  {outcome.chosen:8}{outcome.best:8}{outcome.regret(outcome.chosen):7.2f}{outcome.noise:7.2f}")
        lines.append("".join(cells))
    return lines


def without_width(rows: Sequence[Row]) -> Sequence[Row]:
    """Price rows of every length like rows of 256."""
    usual = {name: min((row.size[1] for row in rows if row.kernel == name), key=lambda w: abs(w - 256), default=0)
             for name in BY_WIDTH}  # fmt: skip
    return [row for row in rows if row.kernel not in BY_WIDTH or row.size[1] == usual[row.kernel]]


def without_operators(rows: Sequence[Row]) -> Sequence[Row]:
    """Price the cheap operators, other than addition, by the roofline."""
    dropped = {"Relu", "Mul", "Sigmoid", "Gelu", "Erf", "Exp", "Sin", "Pow", "Where", "Cast", "Div", "Sqrt"}
    return [row for row in rows if row.kernel not in dropped]


PARTS: Mapping[str, Callable[[Sequence[Row]], Sequence[Row]]] = {
    "row lengths": without_width,
    "cheap operators": without_operators,
}
"""Part of the model -> the rows of a profile without it."""


def main() -> int:
    """Replay each run, and print what the parts of the model change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", default=sorted(KEPT.glob("*.json")))
    parser.add_argument("--table", action="store_true", help="print every graph, not only the summary")
    chosen = parser.parse_args()
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in chosen.runs]
    whole = [outcome for run in runs for outcome in replayed(run)]
    if chosen.table:
        print("\n".join(table(whole)))
    print(f"{'model':28}{'error median / 90th':>22}{'regret':>9}{'noise':>8}{'right':>11}{'worse than 1.3':>16}")
    figures = shown("as it is", whole)
    for title, rows_of in PARTS.items():
        shown(f"without {title}", [outcome for run in runs for outcome in replayed(run, rows_of)])
    for count in (4, 16, 32):
        few = functools.partial(quick_rows, count=count)
        shown(f"quick, {count} rows", [outcome for run in runs for outcome in replayed(run, few)])
    shown("no calibration", [outcome for run in runs for outcome in replayed(run, None)])
    over = [name for name, limit in LIMITS.items() if figures[name] > limit]
    print(f"above the limit: {', '.join(over)}" if over else f"within the limits {LIMITS}")
    return bool(over)


def replayed(
    run: Mapping[str, Any], rows_of: Callable[[Sequence[Row]], Sequence[Row]] | None = lambda rows: rows
) -> list[Outcome]:
    """Return the outcomes of a kept run with new predictions and choices; without `rows_of`, by the shipped figures."""
    models: dict[str, Any] = {}
    for label, rows in run["rows"].items():
        if rows_of is None:
            models[label] = ProfileCostModel(Device(label), shipped_profile(label))
            continue
        kept = [Row(name, tuple(size), ns, dtype) for name, size, dtype, ns in rows]
        profile = CalibrationProfile(ProfileKey(label, f"{label}EP", "kept"), tuple(rows_of(kept)))
        models[label] = model.MeasuredCostModel(Device(label), profile, shipped=shipped_profile(label))
    outcomes = []
    for row in run["cases"]:
        predicted = {
            label: total_ns(workload, cost if workload.host_decides else getattr(cost, "replayed", cost))
            for label, cost in models.items()
            if (workload := _workload(row["name"], label)) is not None
        }
        chosen = min(predicted, key=lambda label: predicted[label])
        outcomes.append(Outcome(row["name"], predicted, row["measured"], row["blocks"], chosen))
    return outcomes


def quick_rows(rows: Sequence[Row], count: int) -> list[Row]:
    """Return the rows that a quick calibration has when time ends after so many, besides those it always has."""
    groups = [(kernel, priority, points) for kernel in KERNELS for priority, points in kernel.groups]
    order = [
        (kernel.name, tuple(kernel.size(point)), kernel.dtype)
        for kernel, priority, points in sorted(groups, key=lambda group: group[1])
        if priority <= QUICK_PRIORITY
        for point in sorted(points, key=kernel.work)
    ]
    known = {(row.kernel, row.size, row.dtype): row for row in rows}
    found = [known[key] for key in order if key in known]
    always = [row for row in found if not row.size]
    measured = [row for row in found if row.size][:count]
    lacking = {"MatMul", "Add"} - {row.kernel for row in measured}  # one point of each is measured whatever the time
    least = [min((row for row in found if row.kernel == name), key=lambda row: row.size) for name in sorted(lacking)]
    return [*always, *measured, *least]


def shipped_profile(label: str) -> CostProfile:
    """Return a device's figures without a calibration; those of the CPU for the machine of the runs."""
    device = Device(label)
    provider = provider_of(device)
    found = None if provider is None else provider.default_profile(device)
    assert found is not None  # the devices of the kept runs have one
    if label != "cpu":
        return found
    more = _CORES / core_share().threads
    return replace(found, gemm_gflops=more * found.gemm_gflops, conv_gflops=more * found.conv_gflops)


def shown(title: str, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Print a line of pooled figures, and return them; the noise is the standard error of the regret."""
    errors = sorted(abs(o.predicted[label] / ns - 1) for o in outcomes for label, ns in o.measured.items())
    regrets = [outcome.regret(outcome.chosen) for outcome in outcomes if len(outcome.measured) > 1]
    found = {
        "error": statistics.median(errors),
        "error_90": errors[int(0.9 * (len(errors) - 1))],
        "regret": _geomean(regrets),
    }
    draw = random.Random(0)  # noqa: S311  # not for secrets
    noise = statistics.stdev(_geomean(draw.choices(regrets, k=len(regrets))) for _ in range(_DRAWS))
    right = f"{sum(regret == 1 for regret in regrets)} of {len(regrets)}"
    error = f"{found['error']:.1%} / {found['error_90']:.1%}"
    print(f"{title:28}{error:>22}{found['regret']:9.4f}{noise:8.4f}{right:>11}{sum(r > 1.3 for r in regrets):16}")
    return found


@functools.cache
def _graphs() -> dict[str, Callable[[], tuple[Graph, Any]]]:
    return {case.name: case.build for case in cases()}


@functools.cache
def _workload(name: str, label: str) -> Workload | None:
    device = Device(label)
    provider, (graph, _) = provider_of(device), _graphs()[name]()
    exported = None if provider is None else model_for(provider, graph, CompileOptions().on(device))
    return None if exported is None else workload_of(exported)


def _geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


if __name__ == "__main__":
    raise SystemExit(main())
