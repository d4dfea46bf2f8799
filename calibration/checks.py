"""The last stage of a calibration: whole graphs are measured, predicted from the rows, and compared."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlx_ort.calibration.corrections import class_of, fit
from rlx_ort.calibration.model import MeasuredCostModel
from rlx_ort.calibration.prober import FAILURES, Prober
from rlx_ort.calibration.profile import CalibrationProfile, Reference
from rlx_ort.calibration.references import REFERENCES, ReferenceGraph
from rlx_ort.calibration.timing import Timed
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError
from rlx_ort.execution.compiled import CompiledGraph
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
_ONCE_MORE = 0.25  # of the time for graphs is for measuring them a second time


class _Measured(NamedTuple):
    """A graph that was measured, and how fast the host was; `compiled` is None where its session is closed."""

    reference: Reference
    pace_ns: float
    graph: Graph
    inputs: Mapping[str, Any]
    compiled: CompiledGraph | None


def check(profile: CalibrationProfile, prober: Prober) -> CalibrationProfile:
    """Return the profile with references, corrections and errors, from as many graphs as there is time for.

    Each is measured twice, first all of them, then all of them again, and the quicker time counts: what else runs on
    the machine slows a device down for longer than one graph is measured. What an accelerator took on a disturbed
    host is left out, since its rows are of an undisturbed one.
    """
    begun = prober.budget.elapsed_ns
    try:
        model = MeasuredCostModel(prober.device, profile)
    except CalibrationError as err:
        _log.info("no graphs are compared with predictions: %s", err)
        return profile
    prober.step("whole graphs")
    measured: list[_Measured] = []
    try:
        _all(model, prober, measured)
        again = [_once_more(one, prober) for one in measured]
    finally:
        for one in measured:
            if one.compiled is not None:
                one.compiled.close()
    prober.account("references", begun)
    limit_ns = prober.pace.limit_ns if prober.launched else math.inf
    found = [reference for reference, pace_ns in again if pace_ns <= limit_ns]
    if len(found) < len(again):
        prober.skipped["disturbed"] = f"{len(again) - len(found)} of {len(again)} graphs, on a disturbed host"
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


def _all(model: MeasuredCostModel, prober: Prober, measured: list[_Measured]) -> None:
    """Measure each graph that there is time for, and leave time to do so again."""
    limit_ns = prober.budget.limit_ns
    limit_ns -= _ONCE_MORE * (limit_ns - prober.budget.elapsed_ns)
    longest_ns = 0.0
    for graph in REFERENCES:
        prober.rest()
        since = prober.budget.elapsed_ns
        if not prober.budget.fits(limit_ns, longest_ns):
            prober.skipped["references"] = f"no time for {graph.name} and those after it"
            break
        try:
            one = _measured(graph, model, prober, limit_ns)
        except FAILURES as err:
            prober.skipped[graph.name] = str(err).splitlines()[0]
            continue
        longest_ns = max(longest_ns, prober.budget.elapsed_ns - since)
        if one is not None:
            measured.append(one)


def _measured(graph: ReferenceGraph, model: MeasuredCostModel, prober: Prober, limit_ns: float) -> _Measured | None:
    built, inputs = graph.build()
    terms = terms_by_class(built, model)
    predicted_ns = sum(terms.values())
    if not terms or predicted_ns > 8 * prober.budget.point_ns:
        return None
    if not prober.budget.fits(limit_ns, _RUNS * predicted_ns):
        return None
    compiled = prober.compile(built)
    try:
        found = prober.time(compiled, inputs, fresh=True, thorough=True)
    except FAILURES:
        compiled.close()
        raise
    if found is None:
        compiled.close()
        return None
    kept: CompiledGraph | None = compiled
    if prober.device.kind == Device.CPU.kind:  # idle threads would take the cores
        compiled.close()
        kept = None
    reference = Reference(graph.name, found.ns, _spread(found), terms)
    return _Measured(reference, found.quicker_pace_ns, built, inputs, kept)


def _once_more(one: _Measured, prober: Prober) -> tuple[Reference, float]:
    """Return what a graph took and how fast the host was, by the quicker of two measurements if there is time."""
    prober.rest()
    first = one.reference
    if not prober.budget.fits(prober.budget.limit_ns, prober.budget.point_ns + _RUNS * first.ns):
        return first, one.pace_ns
    compiled = one.compiled or prober.compile(one.graph)
    try:
        found = prober.time(compiled, one.inputs, fresh=one.compiled is None)
    except FAILURES as err:
        _log.info("%s failed the second time: %s", first.name, err)
        return first, one.pace_ns
    finally:
        if one.compiled is None:
            compiled.close()
    if found is None or found.ns >= first.ns:
        return first, one.pace_ns
    return dataclasses.replace(first, ns=found.ns, spread=_spread(found)), found.quicker_pace_ns


def _spread(found: Timed) -> float:
    return round(found.spread, 4) if found.repeats >= _FEW else 1.0  # one or two runs show none, however wrong they are


def terms_by_class(graph: Graph, model: MeasuredCostModel) -> dict[str, float]:
    """Return class of work -> what a model predicts for it in a graph, in ns; empty where nothing can be predicted."""
    provider = provider_of(model.device)
    exported = None if provider is None else model_for(provider, graph, CompileOptions())
    if exported is None:
        return {}
    workload = workload_of(exported)
    sums: dict[str, float] = {}
    for term in estimate_workload(workload, model).terms:
        name = class_of(term.kind)
        sums[name] = sums.get(name, 0.0) + term.ns
    # Bandwidths were measured by themselves; what is corrected is what each value takes, however small.
    each_ns = len(workload.read) * model.upload_ns(0) + len(workload.written) * model.readback_ns(0)
    sums["transfer"], sums["bytes"] = each_ns, sums.get("transfer", 0.0) - each_ns
    return {name: round(ns, 1) for name, ns in sums.items()}
