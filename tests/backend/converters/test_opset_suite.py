"""The models of the ONNX backend suite at opset 21: all convert or say why not, and results do not change.

A sample is converted and some of it run, of each opset; with `RLX_FULL_OPSET_SWEEP=1` every model is.
"""

from __future__ import annotations

import collections
import os
import warnings
from collections.abc import Sequence
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from onnx_suite.cases import KINDS, Case, all_cases
from onnx_suite.compare import assert_similar
from onnx_suite.plain import run_plain
from sample_models.bundles import whole

from rlx_ort.converters.bundle import ModelBundle, bundle_of
from rlx_ort.converters.transforms.opset import to_opset
from rlx_ort.errors import ConversionError

FULL = "RLX_FULL_OPSET_SWEEP"
EVERYTHING = os.environ.get(FULL, "") not in ("", "0")  # read before the fixtures clear it
TARGET, OLDEST = 21, 7
EVERY = 1 if EVERYTHING else 5  # one model in so many is converted
SAMPLE = 6  # models run at each source opset, and converted whatever their place
LIGHT = {"light/light_shufflenet", "light/light_squeezenet"}  # the classifiers that take the least time

# What opset 21 cannot say, by operator; found with onnx 1.23. Types: element types that came after 21.
LACKING = {"Attention", "BitCast", "CausalConvWithState", "CumProd", "FlexAttention", "LinearAttention", "Scan",
           "TensorScatter"}  # fmt: skip


@pytest.fixture(scope="module")
def cases() -> Sequence[Case]:
    """Return the cases of all kinds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite's own sources overflow and divide by zero on purpose
        return tuple(case for case in all_cases() if case.kind in KINDS)


def passes(model: bytes, sets: Sequence[Any], case: Case) -> bool:
    """Return whether plain ONNX Runtime gives what the case expects."""
    engine = tuple(
        value
        for value in vars(ort.capi.onnxruntime_pybind11_state).values()
        if isinstance(value, type) and issubclass(value, Exception)
    )
    try:
        for inputs, outputs in sets:
            assert_similar(run_plain(model, inputs), list(outputs), case.rtol, case.atol)
    except (AssertionError, RuntimeError, *engine):
        return False
    return True


def refused_for_a_reason(bundle: ModelBundle, message: str) -> bool:
    """Return whether each refused node has an operator, element type or attribute value that opset 21 lacks."""
    lines = [line.strip() for line in message.splitlines()[1:]]
    return bool(lines) and all(
        line.split(" ", 1)[0] in LACKING
        or " does not take tensor(" in line
        or " cannot be inferred" in line
        or "floats may have fmod=0" in line
        or "are defined, as 0, from 28 on only" in line  # shifts by the number of bits and more
        for line in lines
        if not line.startswith("and ")
    )


@pytest.mark.slow
def test_models_of_every_opset_convert_to_21_and_still_match(cases: Sequence[Case]) -> None:
    """What plain ONNX Runtime passes before, it passes after, unless opset 21 has no such operator or type."""
    lost, crashed, unexplained = [], [], []
    ran: collections.Counter[int] = collections.Counter()
    converted: collections.Counter[int] = collections.Counter()
    for index, case in enumerate(cases):
        if case.kind == "light" and not (EVERYTHING or case.id in LIGHT):
            continue  # a large model each
        model, sets = case.load()
        bundle = bundle_of(onnx.ModelProto.FromString(model))
        if bundle.opset < OLDEST or (index % EVERY and converted[bundle.opset] >= SAMPLE and case.id not in LIGHT):
            continue
        try:
            made, _ = to_opset(bundle, TARGET)
        except ConversionError as err:
            if not refused_for_a_reason(bundle, str(err)):
                unexplained.append((case.id, str(err)))
            continue
        except Exception as err:
            crashed.append((case.id, repr(err)))
            continue
        converted[bundle.opset] += 1
        if not EVERYTHING and ran[bundle.opset] >= SAMPLE and case.id not in LIGHT:
            continue
        ran[bundle.opset] += 1
        if passes(model, sets, case) and not passes(whole(made).SerializeToString(), sets, case):
            lost.append(case.id)
    assert (lost, crashed, unexplained) == ([], [], [])
    assert sum(converted.values()) >= 1600 // EVERY
    assert {7, 11, 13, 17, 21, onnx.defs.onnx_opset_version()} <= ran.keys()


@pytest.mark.slow
@pytest.mark.parametrize("target", [13, 17])
def test_going_down_loses_nothing_without_saying_so(cases: Sequence[Case], target: int) -> None:
    """A model that converts to an older opset still gives its results; many are refused, which is right."""
    kept, lost = 0, []
    for index, case in enumerate(cases):
        if case.kind == "light" or (not EVERYTHING and index % 20):
            continue
        model, sets = case.load()
        bundle = bundle_of(onnx.ModelProto.FromString(model))
        if bundle.opset <= target:
            continue
        try:
            made, _ = to_opset(bundle, target)
        except ConversionError:
            continue
        kept += 1
        if passes(model, sets, case) and not passes(whole(made).SerializeToString(), sets, case):
            lost.append(case.id)
    assert lost == []
    assert kept >= 15
