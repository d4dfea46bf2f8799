"""The tables of the regret suite: every case, and the figures that count beside their targets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from regret.engine_policies import POLICIES
from regret.measure import Outcome

__all__ = ["by_family", "summary_lines", "tables"]


def by_family(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes of each family together, in the order in which they were measured."""
    families = list(dict.fromkeys(outcome.family for outcome in outcomes))
    return sorted(outcomes, key=lambda outcome: families.index(outcome.family))


def tables(outcomes: Sequence[Outcome]) -> list[str]:
    """Return one line for each case: predicted and measured by device, the choice, and what it cost."""
    labels = sorted({label for outcome in outcomes for label in outcome.predicted})
    head = f"{'graph':34}" + "".join(f"{label + ' us':>12}{'err':>7}" for label in labels)
    lines = [head + f"  {'chosen':8}{'best':8}{'regret':>7}{'adaptive':>9}{'noise':>7}"]
    for outcome in outcomes:
        cells = [f"{outcome.name:34}"]
        for label in labels:
            measured = outcome.measured.get(label)
            if measured is None:
                cells.append(f"{'skipped':>12}{'':7}")
            else:
                error = outcome.predicted.get(label, math.nan) / measured - 1
                cells.append(f"{measured / 1e3:12.1f}{error:+7.0%}")
        cells.append(f"  {outcome.chosen:8}{outcome.best:8}{outcome.regret(outcome.chosen):7.2f}")
        cells.append(f"{outcome.regret(outcome.adaptive or outcome.chosen):9.2f}{outcome.noise:7.2f}")
        lines.append("".join(cells))
    return lines


def summary_lines(
    outcomes: Sequence[Outcome], policies: Sequence[dict[str, Any]], profiles: dict[str, Any]
) -> list[str]:
    """Return the figures that the suite is for."""
    if not outcomes:
        return ["no case was measured"]
    rivals = [outcome for outcome in outcomes if len(outcome.measured) > 1]
    lines = [f"{len(outcomes)} graphs, {len(rivals)} measured on more than one device"]
    near = [outcome for outcome in rivals if _second(outcome) < 2.5]
    lines.append(f"near a crossover (second best within 2.5 times the best): {len(near)}")
    if rivals:
        for title, pick, targets in (
            ("cost model", lambda outcome: outcome.chosen, (1.05, 1.30)),
            ("adaptive", lambda outcome: outcome.adaptive or outcome.chosen, (1.02, 1.10)),
        ):
            regrets = [outcome.regret(pick(outcome)) for outcome in rivals]  # type: ignore[no-untyped-call]  # a lambda
            lines.append(
                f"regret, {title}: geometric mean {_geomean(regrets):.3f} (target {targets[0]}), "
                f"worst {max(regrets):.2f} (target {targets[1]}), right in {sum(r == 1 for r in regrets)}/{len(rivals)}"
            )
            usual = [outcome.usual_regret(pick(outcome)) for outcome in rivals]  # type: ignore[no-untyped-call]  # as above
            lines.append(
                f"  by the medians of all blocks: geometric mean {_geomean(usual):.3f}, worst {max(usual):.2f}"
            )
        noise = [outcome.noise for outcome in rivals]
        lines.append(
            f"regret that noise makes, one half of the blocks against the other: geometric mean {_geomean(noise):.3f}, "
            f"worst {max(noise):.2f}"
        )
        measured = sum(outcome.adaptive_how == "measured" for outcome in rivals)
        taken = [outcome.adaptive_ns / 1e6 for outcome in rivals if outcome.adaptive_how == "measured"]
        if taken:
            lines.append(f"adaptive measured {measured} graphs, median {statistics.median(taken):.0f} ms each")
    labels = sorted({label for outcome in outcomes for label in outcome.measured})
    pooled = []
    for label in labels:
        errors = [abs(o.predicted[label] / o.measured[label] - 1) for o in outcomes if label in o.measured]
        pooled += errors
        lines.append(f"error on {label}: {_errors(errors)}")
    lines.append(f"error, all together: {_errors(pooled)} (targets: median 25%, 90th percentile 60%)")
    # Only graphs that every device ran are summed, so that the totals compare.
    common = [outcome for outcome in outcomes if all(label in outcome.measured for label in labels)]
    lines.append(f"total time of the {len(common)} graphs that every device ran, one run each, in ms:")
    lines.append(f"  best device for each: {_total(o.measured[o.best] for o in common)}")
    lines.append(f"  cost model: {_total(o.measured[o.chosen] for o in common)}")
    lines.append(f"  adaptive: {_total(o.measured[o.adaptive or o.chosen] for o in common)}")
    lines += [f"  always {label}: {_total(o.measured[label] for o in common)}" for label in labels]
    names = {outcome.name for outcome in common}
    for policy in POLICIES:
        rows = [row[policy] for row in policies if row["name"] in names and "ns" in row.get(policy, {})]
        used = sorted({provider for row in rows for provider in row["providers"][:1]})
        total = _total(row["ns"] for row in rows)
        lines.append(f"  ONNX Runtime's {policy}: {total} over {len(rows)} graphs, on {', '.join(used)}")
    choose = [outcome.choose_again_ns / 1e3 for outcome in outcomes]
    lines.append(f"choosing again: median {statistics.median(choose):.0f} us")
    return lines


def _second(outcome: Outcome) -> float:
    times = sorted(outcome.measured.values())
    return times[1] / times[0]


def _geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def _errors(errors: Sequence[float]) -> str:
    ordered = sorted(errors)
    return f"median {statistics.median(ordered):.0%}, 90th percentile {ordered[int(0.9 * (len(ordered) - 1))]:.0%}"


def _total(times_ns: Iterable[float]) -> str:
    return f"{sum(times_ns) / 1e6:.2f}"
