"""Whole graphs against their predictions: a bounded factor for each class of work, and the error that is left.

A prediction is a sum of terms by class. The factors minimise the squared logarithms of measured over predicted time,
held towards 1, so that a class that hardly takes part in any graph, or that graphs disagree about, keeps its rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlx_ort.calibration.profile import Reference

__all__ = ["LEAST_ERROR", "Fit", "class_of", "error_of", "fit"]

LEAST_ERROR = 0.15
"""No class is said to be predicted better than this: the graphs that were measured are few."""

_UNKNOWN_ERROR = 0.4  # of a class without references
_LARGEST = math.log(2.5)  # a factor is between 1 / 2.5 and 2.5
_HOLD = 4.0  # pull towards 1, in squared residuals: as if four graphs more of the class said that nothing is wrong
_STEPS = 40

_CLASSES: Mapping[str, str] = {
    "overhead": "overhead",
    "transfer": "transfer",
    "bytes": "bytes",
    "gemm": "product",
    "bmm": "attention",
    "attention": "attention",
    "conv": "convolution",
    "pointwise": "convolution",
    "depthwise": "convolution",
    "rnn": "recurrent",
    "fused": "elements",
    "view": "copies",
    "Softmax": "rows",
    "LayerNormalization": "rows",
    "ReduceMean": "rows",
    "MaxColumns": "rows",
    "SumColumns": "rows",
    "MaxOfGiven": "rows",
    "SumOfGiven": "rows",
    "Gather": "copies",
    "Lookup": "copies",
    "Transpose": "copies",
    "TransposeRows": "copies",
    "Concat": "copies",
    "Reshape": "copies",
}


class Fit(NamedTuple):
    """Class of work -> factor, and class of work -> the error to expect, as a share."""

    corrections: dict[str, float]
    errors: dict[str, float]


def class_of(kind: str) -> str:
    """Return the class of work of a term's kind: a formula's name, or the operator that stands for the node."""
    return _CLASSES.get(kind, "elements")


def fit(references: Sequence[Reference]) -> Fit:
    """Return what the references say about each class; nothing for classes that none of them has."""
    classes = sorted({name for reference in references for name in reference.terms} - _FIXED)
    usable = [reference for reference in references if reference.ns > 0 and sum(reference.terms.values()) > 0]
    if not classes or len(usable) < 3:
        return Fit({}, {})
    parts = np.array([[reference.terms.get(name, 0.0) for name in classes] for reference in usable])
    fixed = np.array([sum(reference.terms.get(name, 0.0) for name in _FIXED) for reference in usable])
    measured = np.log([reference.ns for reference in usable])
    # A graph whose runs lie far apart says less.
    trust = np.array([1.0 / (1.0 + 4.0 * reference.spread) for reference in usable])
    logs = _solved(parts, fixed, measured, trust)
    total = fixed + parts @ np.exp(logs)
    left = np.abs(measured - np.log(total))
    shares = parts * np.exp(logs) / total[:, None]
    errors = {}
    for at, name in enumerate(classes):
        weight = shares[:, at] * trust
        # One graph more, of an unknown class' error, stands for what these few do not show.
        squares = float(weight @ left**2) + 0.25 * math.log1p(_UNKNOWN_ERROR) ** 2
        errors[name] = max(math.expm1(math.sqrt(squares / (float(weight.sum()) + 0.25))), LEAST_ERROR)
    return Fit({name: round(float(np.exp(logs[at])), 4) for at, name in enumerate(classes)}, errors)


def error_of(terms: Mapping[str, float], errors: Mapping[str, float], otherwise: float) -> float:
    """Return the error to expect of a sum of terms by class: that of each class by its share in the sum."""
    total = sum(terms.values())
    if total <= 0:
        return otherwise
    return sum(ns * errors.get(name, otherwise) for name, ns in terms.items()) / total


_FIXED = frozenset({"overhead", "bytes"})  # measured by themselves, steadily


def _solved(
    parts: npt.NDArray[Any], fixed: npt.NDArray[Any], measured: npt.NDArray[Any], trust: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return the logarithms of the factors, by Gauss-Newton steps that stay within the bounds."""
    count = parts.shape[1]
    logs = np.zeros(count)
    for _ in range(_STEPS):
        scaled = parts * np.exp(logs)
        total = fixed + scaled.sum(axis=1)
        residual = measured - np.log(total)
        # One graph far off must not bend every class: beyond a factor of 1.5 it counts in proportion, not squared.
        weight = trust * np.minimum(1.0, math.log(1.5) / np.maximum(np.abs(residual), 1e-9))
        slope = scaled / total[:, None]
        matrix = slope.T @ (weight[:, None] * slope) + _HOLD * np.eye(count)
        step = np.linalg.solve(matrix, slope.T @ (weight * residual) - _HOLD * logs)
        logs = np.clip(logs + np.clip(step, -0.5, 0.5), -_LARGEST, _LARGEST)
        if float(np.abs(step).max()) < 1e-6:
            break
    return logs
