"""Choose again for runs of scripts/regret_suite.py that were kept, with the cost model as it is now.

    python scripts/regret_replay.py docs/results/h200-2026-11-22/run5 docs/results/h200-2026-11-22/run7

Nothing is measured: the rows and the reference graphs' times come from the kept profiles, the graphs' times from
regret.json. Predictions, corrections, choices and regrets are computed anew, so a change of the model shows in seconds
and on the same figures. A change of what the probes measure does not show: that takes a new run.

With two runs, each one's measured times also serve as predictions of the other: no calibration does better than that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from regret.cases import cases
from regret.measure import Outcome
from regret.tables import by_family, summary_lines, tables
from rlx_ort.calibration.checks import terms_by_class
from rlx_ort.calibration.corrections import fit
from rlx_ort.calibration.model import MeasuredCostModel
from rlx_ort.calibration.profile import SCHEMA, CalibrationProfile
from rlx_ort.calibration.references import REFERENCES
from rlx_ort.device import Device
from rlx_ort.execution.options import CompileOptions
from rlx_ort.ir.graph import Graph
from rlx_ort.selection.availability import provider_of
from rlx_ort.selection.estimate import total_ns
from rlx_ort.selection.support import model_for
from rlx_ort.selection.workload import Workload, workload_of

_NEAR = 2.5  # times the best: a second device within it is near


def main() -> None:
    """Replay each run, and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders with regret.json and the profiles")
    parser.add_argument("--as-kept", action="store_true", help="keep the corrections that the profiles have")
    parser.add_argument("--table", action="store_true", help="print every graph, not only the summary")
    chosen = parser.parse_args()
    found = [_replayed(folder, refit=not chosen.as_kept) for folder in chosen.runs]
    for folder, (outcomes, moved) in zip(chosen.runs, found, strict=True):
        print(f"== {folder}; predictions moved by {moved:.1%} at the most")
        lines = tables(outcomes)
        print("\n".join(lines if chosen.table else [lines[0], *_costly(outcomes, lines[1:])]))
        print("\n".join(line for line in summary_lines(outcomes, [], {}) if "error" in line or "cost model" in line))
        print("\n".join(_against(outcomes)))
    if len(found) == 2:
        print("\n".join(_bound(found[0][0], found[1][0])))


def _replayed(folder: Path, *, refit: bool) -> tuple[list[Outcome], float]:
    """Return the outcomes of a run with new predictions and choices, and how far a prediction moved at most."""
    kept = json.loads((folder / "regret.json").read_text(encoding="utf-8"))
    graphs = {case.name: case for case in cases()}
    models = {label: _model(folder, label, refit=refit) for label in kept["devices"]}
    outcomes, moved = [], 0.0
    for row in kept["cases"]:
        graph, _ = graphs[row["name"]].build()
        predicted = dict(_predicted(graph, models))
        moved = max([moved, *(abs(ns / row["predicted"][label] - 1) for label, ns in predicted.items())])
        outcome = Outcome(row["family"], row["name"], predicted, measured=row["measured"], blocks=row["blocks"])
        outcome.chosen = min(predicted, key=lambda label: predicted[label])
        outcomes.append(outcome)
    return by_family(outcomes), moved


def _model(folder: Path, label: str, *, refit: bool) -> MeasuredCostModel:
    document = json.loads((folder / f"profile-{label.replace(':', '-')}.json").read_text(encoding="utf-8"))
    document["schema"] = SCHEMA  # rows of an older one are read as far as they go
    device = Device(label)
    profile = _modern(CalibrationProfile.from_json(json.dumps(document)))
    if not refit:
        return MeasuredCostModel(device, profile)
    raw = MeasuredCostModel(device, dataclasses.replace(profile, corrections={}))
    graphs = {reference.name: reference for reference in REFERENCES}
    again = [
        dataclasses.replace(reference, terms=terms_by_class(graphs[reference.name].build()[0], raw))
        for reference in profile.references
        if reference.name in graphs
    ]
    return MeasuredCostModel(device, dataclasses.replace(profile, corrections=fit(again).corrections))


def _modern(profile: CalibrationProfile) -> CalibrationProfile:
    """Return a profile of schema 2 with its rows `lone`, what a product alone takes more, as rows `alone`.

    On a CPU it takes less, which schema 2 cut off at 0.
    """
    chained = {row.size: row.ns for row in profile.rows if row.probe == "gemm" and row.dtype == "f32"}
    lone = [row for row in profile.rows if row.probe == "lone" and row.size in chained and row.ns > 0]
    alone = [dataclasses.replace(row, probe="alone", ns=row.ns + chained[row.size]) for row in lone]
    return dataclasses.replace(profile, rows=(*profile.rows, *alone))


def _predicted(graph: Graph, models: Mapping[str, MeasuredCostModel]) -> Iterator[tuple[str, float]]:
    for label, model in models.items():
        workload = _workload(graph, Device(label))
        if workload is not None:
            yield label, total_ns(workload, model)


def _workload(graph: Graph, device: Device) -> Workload | None:
    provider = provider_of(device)
    exported = None if provider is None else model_for(provider, graph, CompileOptions().on(device))
    return None if exported is None else workload_of(exported)


def _costly(outcomes: Sequence[Outcome], lines: Sequence[str]) -> list[str]:
    return [line for outcome, line in zip(outcomes, lines, strict=True) if outcome.regret(outcome.chosen) > 1.1]


def _against(outcomes: Sequence[Outcome]) -> list[str]:
    """Return how far the two best devices of graphs near a crossover are mispredicted against each other."""
    errors = []
    for outcome in outcomes:
        if len(outcome.measured) < 2:
            continue
        best, second = sorted(outcome.measured, key=lambda label: outcome.measured[label])[:2]
        ratio = outcome.measured[second] / outcome.measured[best]
        if ratio < _NEAR:
            errors.append((math.log(outcome.predicted[second] / outcome.predicted[best] / ratio), outcome.name))
    square = sum(error**2 for error, _ in errors) / max(len(errors), 1)
    worst = "; ".join(f"{name} {math.exp(error):.2f}" for error, name in sorted(errors)[:6])
    return [
        f"near a crossover, best against second: error {math.expm1(math.sqrt(square)):.0%} (root mean square)",
        f"  most in favour of the second: {worst}",
    ]


def _bound(first: Sequence[Outcome], second: Sequence[Outcome]) -> list[str]:
    """Return the regret of choosing by what the other run measured."""
    lines = []
    for title, here, there in (("first by second", first, second), ("second by first", second, first)):
        best = {outcome.name: outcome.best for outcome in there}
        regrets = sorted((outcome.regret(best[outcome.name]), outcome.name) for outcome in here if outcome.name in best)
        mean = math.exp(sum(math.log(regret) for regret, _ in regrets) / len(regrets))
        worst = ", ".join(f"{name} {regret:.2f}" for regret, name in regrets[:-4:-1])
        lines.append(f"{title} run's measured times: geometric mean {mean:.3f}; worst {worst}")
    return lines


if __name__ == "__main__":
    main()
