"""Rules of control flow: the rows that a body keeps, however often it runs."""

from __future__ import annotations

from collections.abc import Sequence

from rlx_ort.converters.row_independence.facts import RefusedError, Size, Value, axis_at, refuse_if, refuse_sizes
from rlx_ort.converters.row_independence.proof import BodyRule, Node, Proof


def _if(proof: Proof, node: Node, known: dict[str, Value]) -> list[Value]:
    """Both branches are proved, or the one that is taken; the condition is the same for all rows."""
    node.same_for_all(0)
    branches, condition = [], node.need(0)
    known_to_be = condition.data.any() if condition.data is not None else (condition.content or (None,))[0]
    whole = known_to_be.whole if isinstance(known_to_be, Size) else known_to_be
    names = ("then_branch", "else_branch") if whole is None else ("then_branch",) if whole else ("else_branch",)
    for name in names:
        graph, inner = node.attributes[name], dict(known)
        proof.inner_body(graph, inner)
        branches.append([inner[value.name] for value in graph.output])
    results = []
    for one, other in zip(branches[0], branches[-1], strict=True):
        if one is other or (one == other and one.data is None):
            results.append(one)
            continue
        refuse_if(not _have_same_rows(one, other), "its branches give rows on different axes")
        results.append(Value(_common(proof, one, other), one.axis))
    return results


def _have_same_rows(one: Value, other: Value) -> bool:
    """Return whether two values have as many rows on the same axis, or none, and no elements that count them."""
    if one.axis != other.axis or any(value.sized or value.places for value in (one, other)):
        return False
    return one.axis is None or (one.rank == other.rank and one.rows == other.rows)


def _common(proof: Proof, one: Value, other: Value) -> tuple[Size, ...] | None:
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return None
    return tuple([a if a == b else proof.unknown() for a, b in zip(one.shape, other.shape, strict=True)])


def _loop(proof: Proof, node: Node, known: dict[str, Value]) -> list[Value]:
    """A body that keeps the rows of each state on their axis, run as often for each batch."""
    node.same_for_all(0, 1)
    graph, inner = node.attributes["body"], dict(known)
    states = [_state(proof, node.need(place)) for place in range(2, len(node.inputs))]
    given = [Value(()), Value(()), *states]
    inner.update((value.name, source) for value, source in zip(graph.input, given, strict=True))
    proof.inner_body(graph, inner)
    going_on, *results = [inner[value.name] for value in graph.output]
    refuse_if(going_on.axis is not None or going_on.sized, "goes on as long as a row says")
    _keeps_states(states, results)
    return [*states, *(_stacked(proof, value) for value in results[len(states) :])]


def _scan(proof: Proof, node: Node, known: dict[str, Value]) -> list[Value]:
    """A body that keeps the rows of each state on their axis, over values along another axis."""
    graph, inner, count = node.attributes["body"], dict(known), node.attributes["num_scan_inputs"]
    values = [node.need(place) for place in range(len(node.inputs))]
    refuse_if(node.version < 9, "scans a batch")
    refuse_sizes(*values, places=True)
    states = [_state(proof, value) for value in values[:-count]]
    scanned = values[-count:]
    axes = node.attributes.get("scan_input_axes") or [0] * count
    for value, number in zip(scanned, axes, strict=True):
        axis = axis_at(number, value.rank)
        refuse_if(axis == value.axis, "goes along the rows")
        rows = None if value.axis is None else value.axis - (axis < value.axis)
        states.append(Value((*value.dims[:axis], *value.dims[axis + 1 :]), rows))
    inner.update((value.name, state) for value, state in zip(graph.input, states, strict=True))
    proof.inner_body(graph, inner)
    results = [inner[value.name] for value in graph.output]
    kept = states[:-count]
    _keeps_states(kept, results)
    parts = results[len(kept) :]
    places = node.attributes.get("scan_output_axes") or [0] * len(parts)
    return [*kept, *(_stacked(proof, part, place) for part, place in zip(parts, places, strict=True))]


def _state(proof: Proof, value: Value) -> Value:
    """Return a state at any turn: other sizes than that of the rows may change."""
    refuse_sizes(value, places=True)
    shape = value.shape and tuple([s if at == value.axis else proof.unknown() for at, s in enumerate(value.shape)])
    return Value(shape, value.axis)


def _keeps_states(states: Sequence[Value], results: Sequence[Value]) -> None:
    for before, after in zip(states, results, strict=False):
        refuse_if(not _have_same_rows(after, before), "a state does not keep its rows on their axis")
        if after.axis is None and after.shape is not None and before.shape is not None and after.rank != before.rank:
            raise RefusedError("a state changes its rank")


def _stacked(proof: Proof, value: Value, place: int = 0) -> Value:
    """Return the values of all turns along a new axis."""
    refuse_sizes(value, places=True)
    if value.shape is None:
        return Value(None)
    place = axis_at(place, value.rank + 1)
    axis = None if value.axis is None else value.axis + (place <= value.axis)
    return Value((*value.dims[:place], proof.unknown(), *value.dims[place:]), axis)


RULES: dict[tuple[str, str], BodyRule] = {("", "If"): _if, ("", "Loop"): _loop, ("", "Scan"): _scan}
