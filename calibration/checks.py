"""The last stage of a calibration: whole graphs are measured, predicted from the rows, and compared."""

from __future__ import annotations

import dataclasses
import logging

from rlx_ort.calibration.corrections import class_of, fit
from rlx_ort.calibration.model import MeasuredCostModel
from rlx_ort.calibration.prober import FAILURES, Prober
from rlx_ort.calibration.profile import CalibrationProfile, Reference
from rlx_ort.calibration.references import REFERENCES, ReferenceGraph
from rlx_ort.errors import CalibrationError
from rlx_ort.execution.options import CompileOptions
from rlx_ort.ir.graph import Graph
from rlx_ort.selection.availability import provider_of
from rlx_ort.selection.estimate import estimate_workload
from rlx_ort.selection.support import model_for
from rlx_ort.selection.workload import workload_of

__all__ = ["check", "terms_by_class"]

_log = logging.getLogger(__name__)
_FEW = 3
_RUNS = 5  # of a slow graph: two to warm up, three that count


def check(profile: CalibrationProfile, prober: Prober) -> CalibrationProfile:
    """Return the profile with references, corrections and errors, from as many graphs as there is time for."""
    begun = prober.budget.elapsed_ns
    try:
        model = MeasuredCostModel(prober.device, profile)
    except CalibrationError as err:
        _log.info("no graphs are compared with predictions: %s", err)
        return profile
    prober.step("whole graphs")
    found: list[Reference] = []
    longest_ns = 0.0
    for graph in REFERENCES:
        since = prober.budget.elapsed_ns
        if not prober.budget.fits(prober.budget.limit_ns, longest_ns):
            prober.skipped["references"] = f"no time for {graph.name} and those after it"
            break
        try:
            reference = _measured(graph, model, prober)
        except FAILURES as err:
            prober.skipped[graph.name] = str(err).splitlines()[0]
            continue
        longest_ns = max(longest_ns, prober.budget.elapsed_ns - since)
        if reference is not None:
            found.append(reference)
    prober.account("references", begun)
    result = fit(found)
    return dataclasses.replace(
        profile,
        references=tuple(found),
        corrections=result.corrections,
        errors={name: round(error, 4) for name, error in result.errors.items()},
        elapsed_s=round(prober.budget.elapsed_ns / 1e9, 2),
        skipped=dict(prober.skipped),
        spent=dict(prober.spent),
    )


def _measured(graph: ReferenceGraph, model: MeasuredCostModel, prober: Prober) -> Reference | None:
    built, inputs = graph.build()
    terms = terms_by_class(built, model)
    predicted_ns = sum(terms.values())
    if not terms or predicted_ns > 8 * prober.budget.point_ns:
        return None
    if not prober.budget.fits(prober.budget.limit_ns, _RUNS * predicted_ns):
        return None
    compiled = prober.compile(built)
    try:
        found = prober.time(compiled, inputs, fresh=True, thorough=True)
    finally:
        compiled.close()
    if found is None:
        return None
    spread = found.spread if found.repeats >= _FEW else 1.0  # one or two runs show no spread, however wrong they are
    return Reference(graph.name, found.ns, round(spread, 4), terms)


def terms_by_class(graph: Graph, model: MeasuredCostModel) -> dict[str, float]:
    """Return class of work -> what a model predicts for it in a graph, in ns; empty where nothing can be predicted."""
    provider = provider_of(model.device)
    exported = None if provider is None else model_for(provider, graph, CompileOptions())
    if exported is None:
        return {}
    sums: dict[str, float] = {}
    for term in estimate_workload(workload_of(exported), model).terms:
        name = class_of(term.kind)
        sums[name] = sums.get(name, 0.0) + term.ns
    return {name: round(ns, 1) for name, ns in sums.items()}
