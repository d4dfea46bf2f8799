"""Random models whose rows are proved independent give each row the same alone, together, padded and beside others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from row_models import ROWS, Made, fixed, made_of, other_values
from row_runs import difference, influence, opened

from rlx_ort.converters import row_independence
from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.converters.row_independence import model_row_independence, padding_independence
from rlx_ort.errors import ConversionError

SECONDS = 3.0
FAULT_S = 30.0
TRUE_ROWS = 5  # of ROWS, in padded runs
TOLERANCE = 1e-3  # kernels may add in another order for other sizes
FEWEST = 20  # models, on a slow machine too
YES = 0.4  # at least this share is proved: a proof that refuses everything would pass


def batched(made: Made, source: np.random.Generator) -> str | None:
    """Return how rows of a model that is proved influence each other, or None if it is not proved."""
    if not model_row_independence(made.model, "N"):
        return None
    session = opened(made.model)
    changed = influence(session, made.feeds, lambda array, row: other_values(source, array, [row]))
    try:
        return changed or difference(session, made.feeds, TOLERANCE)
    except Exception:  # the engine refuses a row alone; its classes are its own
        return ""


def padded(made: Made, source: np.random.Generator) -> str | None:
    """Return how padding changes the rows of a model that is proved for one number of rows, or None if it is not."""
    model = fixed(made.model)
    try:
        proof = padding_independence(from_onnx(model), dict.fromkeys(made.feeds, 0), ROWS)
    except ConversionError:
        return None
    if not proof:
        return None
    session, axis, keep = opened(model), proof.axes[0], range(TRUE_ROWS)
    feeds = {name: array.copy() for name, array in made.feeds.items()}
    for array in feeds.values():
        array[TRUE_ROWS:] = np.zeros((), array.dtype)

    def run(given: dict[str, Any]) -> Any:
        output = session.run(None, given)[0]
        return output if axis is None else np.take(output, range(output.shape[axis] // ROWS * TRUE_ROWS), axis)

    try:
        first = run(feeds)
        again = run({name: other_values(source, array, keep) for name, array in feeds.items()})
        exact = opened(made.model).run(None, {name: array[:TRUE_ROWS] for name, array in feeds.items()})[0]
    except Exception:  # shapes that were made for ROWS rows do not fit fewer
        return ""
    if first.tobytes() != again.tobytes():
        return f"{first} or {again} with other padding"
    if first.shape != exact.shape or not np.allclose(first, exact, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
        return f"{first} padded, {exact} without padding"
    return ""


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@pytest.mark.parametrize("judge", [batched, padded])
def test_fresh_models_that_are_proved_keep_their_rows_apart(
    judge: Callable[[Made, np.random.Generator], str | None],
) -> None:
    """Seeds of the clock, for a bounded time; many are proved."""
    seed, end, verdicts = int(time.time() * 1000) % 2**48, time.monotonic() + SECONDS, []
    while time.monotonic() < end or len(verdicts) < FEWEST:
        seed += 1
        if (made := made_of(seed)) is not None:
            verdict = judge(made, np.random.default_rng(seed))
            assert not verdict, f"seed {seed}, {made.operators}: {verdict}"
            verdicts.append(verdict)
    assert verdicts.count("") > YES * len(verdicts)


def _as_given(proof: Any, node: Any) -> list[Any]:
    """Stand in for a rule: whatever the operator does, the rows stay where they are."""
    return [node.need(0)] * len(node.proto.output)


def _somehow(proof: Any, given: Any, sizes: Any) -> Any:
    """Stand in for a reshape: the axis with the number of rows in its size has the rows."""
    return row_independence._Value(tuple(sizes), next((at for at, size in enumerate(sizes) if size.batched), 0))


_SCALAR = row_independence._Value(())
FAULTS: dict[str, tuple[str, str, Any]] = {
    "a mean over rows": ("normal", "_RULES LayerNormalization", _as_given),
    "a sum over the rows before": ("along", "_RULES CumSum", _as_given),
    "rows taken by number": ("gather_elements", "_RULES GatherElements", _as_given),
    "a scale for all rows": (
        "quantised",
        "_RULES DynamicQuantizeLinear",
        lambda _, node: [node.need(0), _SCALAR, _SCALAR],
    ),
    "the number of rows as an element": ("measured", "_Value sized", False),
    "rows joined by a reshape": ("refilled", "_reshaped", _somehow),
}
"""The nodes that show what is wrong in the proof, where it is, and what stands there instead."""


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_proof_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is proved and mixes rows."""
    often, place, wrong = FAULTS[fault]
    holder, _, name = place.rpartition(" ")
    if holder == "_RULES":
        monkeypatch.setitem(row_independence._RULES, ("", name), wrong)
    else:
        monkeypatch.setattr(getattr(row_independence, holder) if holder else row_independence, name, wrong)
    end = time.monotonic() + FAULT_S
    for seed in itertools.count():
        assert time.monotonic() < end, f"no model of {seed} seeds shows it"
        made = made_of(seed, often)
        if made is not None and batched(made, np.random.default_rng(seed)):
            return
