"""Generated graphs whose rows are proved independent give each row the same alone, together, padded and beside others.

Each rule of the proof has its models in `tests/backend/converters/test_row_rules.py`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from generated.graphs import made_of, quiet
from row_runs import difference, influence, opened

from rlx_ort import RlxError, from_onnx, to_onnx
from rlx_ort.converters.row_independence import model_row_independence, operators, padding_independence

DIM = "n"
"""The dim of rows in graphs that have rows."""
ROWS = 7
TRUE_ROWS = 5  # of ROWS, in padded runs
SECONDS = 3.0
FAULT_S = 30.0
TOLERANCE = 1e-3  # kernels may add in another order for other sizes
FEWEST = 20  # models, on a slow machine too
YES = 0.2  # at least this share is proved: a proof that refuses everything would pass


class Rows(NamedTuple):
    """A model of one output with rows on the first axis, and values for its inputs."""

    model: onnx.ModelProto
    feeds: dict[str, Any]


def models(first: int) -> Iterator[tuple[int, Rows]]:
    """Yield the models of seeds whose graphs have rows in every input and in the output."""
    for seed in itertools.count(first // 2 * 2, 2):
        try:
            graph = made_of(seed, outputs=[0]).graph
            model = to_onnx(graph)
        except RlxError:
            continue
        shapes = {value.name: [*value.shape] for value in graph.inputs}
        rows = all(first == DIM and all(isinstance(dim, int) for dim in inner) for first, *inner in shapes.values())
        if rows and [*graph.outputs[0].shape][:1] == [DIM]:
            source = np.random.default_rng(seed)
            feeds = {
                value.name: source.integers(0, 5, [ROWS, *shapes[value.name][1:]]).astype(value.dtype.numpy)
                for value in graph.inputs
            }
            yield seed, Rows(model, feeds)


def other_values(source: np.random.Generator, array: Any, rows: Sequence[int]) -> Any:
    """Return an array with other values in all rows but some."""
    changed = source.integers(0, 100, array.shape).astype(array.dtype)
    if array.dtype.kind == "f":
        changed *= source.choice(np.array([1, 0, np.inf, np.nan, -100], array.dtype))
    changed[list(rows)] = array[list(rows)]
    return changed


def runs(session: ort.InferenceSession, feeds: dict[str, Any]) -> bool:
    """Return whether the engine runs a model at all: a LayerNormalization of empty rows, say, it refuses."""
    try:
        session.run(None, feeds)
    except Exception:  # its classes are those of the engine
        return False
    return True


def batched(made: Rows, source: np.random.Generator) -> str | None:
    """Return how rows of a model that is proved influence each other, or None if it is not proved or does not run."""
    if not model_row_independence(made.model, DIM):
        return None
    session = opened(made.model)
    if not runs(session, made.feeds):
        return None
    changed = influence(session, made.feeds, lambda array, row: other_values(source, array, [row]))
    return changed or difference(session, made.feeds, TOLERANCE)


def padded(made: Rows, source: np.random.Generator) -> str | None:
    """Return how padding changes the rows of a model that is proved for one number of rows, or None if it is not."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(made.model)
    for value in fixed.graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = ROWS
    fixed.graph.output[0].type.tensor_type.ClearField("shape")
    proof = padding_independence(from_onnx(fixed), dict.fromkeys(made.feeds, 0), ROWS)
    if not proof:
        return None
    session, axis = opened(fixed), proof.axes[0]
    if not runs(session, made.feeds):
        return None
    feeds = {name: array.copy() for name, array in made.feeds.items()}
    for array in feeds.values():
        array[TRUE_ROWS:] = np.zeros((), array.dtype)

    def run(given: dict[str, Any]) -> Any:
        output = session.run(None, given)[0]
        return output if axis is None else np.take(output, range(output.shape[axis] // ROWS * TRUE_ROWS), axis)

    first = run(feeds)
    again = run({name: other_values(source, array, range(TRUE_ROWS)) for name, array in feeds.items()})
    exact = opened(made.model).run(None, {name: array[:TRUE_ROWS] for name, array in feeds.items()})[0]
    if not np.allclose(first, again, 1e-6, 1e-6, equal_nan=True):
        return f"{first} or {again} with other padding"
    if first.shape != exact.shape or not np.allclose(first, exact, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
        return f"{first} padded, {exact} without padding"
    return ""


@pytest.mark.parametrize("judge", [batched, padded])
def test_fresh_models_that_are_proved_keep_their_rows_apart(
    judge: Callable[[Rows, np.random.Generator], str | None],
) -> None:
    """Seeds of the clock, for a bounded time; many are proved."""
    end, verdicts = time.monotonic() + SECONDS, []
    with quiet():
        for seed, made in models(int(time.time() * 1000) % 2**48):
            verdict = judge(made, np.random.default_rng(seed))
            assert not verdict, f"seed {seed}: {verdict}"
            verdicts.append(verdict)
            if time.monotonic() > end and len(verdicts) >= FEWEST:
                break
    assert verdicts.count("") > YES * len(verdicts), len(verdicts)


def test_a_fault_of_the_proof_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that lets sums over the rows before pass: a model is proved and mixes rows."""
    monkeypatch.setitem(operators.RULES, ("", "CumSum"), lambda proof, node: [node.need(0)] * len(node.proto.output))
    end = time.monotonic() + FAULT_S
    with quiet():
        for seed, made in models(0):
            assert time.monotonic() < end, f"no model of {seed} seeds shows it"
            if batched(made, np.random.default_rng(seed)):
                return
