"""The ONNX backend suite through the library: import, export, compile on the CPU, run, compare.

`known_failures.toml` lists what cannot pass with the versions of ONNX Runtime it names, with the reason of each group.
"""

from __future__ import annotations

import functools
import tomllib
import warnings
from pathlib import Path

import onnxruntime as ort
import pytest
from onnx_suite.cases import KINDS, Case, all_cases
from onnx_suite.compare import failure
from onnx_suite.plain import engine_exceptions, run_plain, run_with_rlx

from rlx_ort.errors import RlxError

KNOWN = tomllib.loads(Path(__file__).with_name("known_failures.toml").read_text(encoding="utf-8"))
VERSION = ".".join(ort.__version__.split(".")[:2])
GROUPS = [group for group in KNOWN["group"] if group.get("only", VERSION) == VERSION]
FAILING = {case: group["reason"] for group in GROUPS for case in group["cases"]}
# Cases whose outcome depends on the machine: random numbers, missing locales, the last bit of a sum.
UNSTEADY = {case for group in GROUPS for case in group["cases"] if group.get("unsteady", False)}

pytestmark = pytest.mark.skipif(
    VERSION not in KNOWN["passes_at_least"], reason=f"no list of known failures was made for ONNX Runtime {VERSION}"
)


@functools.cache
def cases_of(kind: str) -> tuple[Case, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite's own sources overflow and divide by zero on purpose
        return tuple(case for case in all_cases() if case.kind == kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_case_passes_or_is_a_known_failure(kind: str) -> None:
    """A case passes exactly when it is not listed; what depends on the machine may do either."""
    unexpected = {}
    for case in cases_of(kind):
        why = failure(case, run_with_rlx, (RlxError,))
        if bool(why) != (case.id in FAILING) and (why or case.id not in UNSTEADY):
            unexpected[case.id] = why or "passes, but is listed as a known failure"
    assert not unexpected


@pytest.mark.slow
def test_whatever_plain_onnx_runtime_passes_is_not_a_known_failure() -> None:
    """Each known failure fails in plain ONNX Runtime too, so the library never loses a case."""
    listed = [case for kind in KINDS for case in cases_of(kind) if case.id in FAILING and case.id not in UNSTEADY]
    assert [case.id for case in listed if not failure(case, run_plain, engine_exceptions())] == []


def test_the_known_failures_are_cases_and_few_enough() -> None:
    """Every listed case exists, none is listed twice, and at least as many pass as the library promises."""
    known = {case.id for kind in KINDS for case in cases_of(kind)}
    listed = [case for group in GROUPS for case in group["cases"]]
    assert set(listed) <= known
    assert len(listed) == len(set(listed))
    assert all(group["reason"] for group in GROUPS)
    assert len(known) - len(listed) >= KNOWN["passes_at_least"][VERSION]
