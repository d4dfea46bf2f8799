"""Control flow and functions."""

from __future__ import annotations

import itertools

import numpy as np

from interpreter.core import Array, rule, run_body
from rlx_ort.ir.core import Node
from rlx_ort.ir.ops import control

__all__: list[str] = []


@rule(control.If)
def _if(node: Node, op: control.If, predicate: Array, *given: Array) -> tuple[Array, ...]:
    captured = (predicate, *given)
    if predicate.size == 1:
        body = op.then_body if bool(predicate.reshape(-1)[0]) else op.else_body
        return tuple(run_body(body, given, captured))
    both = (run_body(body, given, captured) for body in (op.then_body, op.else_body))
    return tuple(np.where(predicate, yes, no) for yes, no in zip(*both, strict=True))


@rule(control.While)
def _while(node: Node, op: control.While, *given: Array) -> tuple[Array, ...]:
    carried, fixed = [*given[: op.carries]], given[op.carries :]
    for turn in itertools.count():
        if op.max_iterations is not None and turn >= op.max_iterations:
            break
        if not bool(run_body(op.cond, [*carried, *fixed], given)[0].reshape(-1)[0]):
            break
        carried = run_body(op.body, [*carried, *fixed], given)
    return tuple(carried)


@rule(control.Scan)
def _scan(node: Node, op: control.Scan, carry: Array, *given: Array) -> Array:
    fixed, rows = given[: op.num_bcast], given[op.num_bcast :]
    trajectory = []
    captured = (carry, *given)
    for t in range(op.length):
        (carry,) = run_body(op.body, [carry, *fixed, *(row[t] for row in rows)], captured)
        trajectory.append(carry)
    if op.save_trajectory:
        return np.stack(trajectory) if trajectory else np.zeros((0, *carry.shape), carry.dtype)
    if op.num_checkpoints:
        return np.stack([trajectory[t * op.length // op.num_checkpoints] for t in range(op.num_checkpoints)])
    return carry


@rule(control.CustomFn)
def _custom_fn(node: Node, op: control.CustomFn, *given: Array) -> tuple[Array, ...]:
    return tuple(run_body(op.fwd, given, given))
