"""Recognises norms: GroupNorm with SiLU, as PyTorch's exporters and ONNX write it, and the products of RMS norms."""

from __future__ import annotations

from typing import NamedTuple

from rlx_ort.converters.attention_patterns import Matcher, operands, operator_of
from rlx_ort.ir.core import Node, Ref
from rlx_ort.ir.ops.leaf import Constant, Param
from rlx_ort.ir.ops.onnx import OnnxNode

_PER_CHANNEL = 21
"""The first opset whose GroupNormalization has a scale for each channel; before there is one for each group."""
_MOST_CHANNELS = 512
"""The most channels of a group. CUDA's kernel reads them in pairs, in one block of threads.
https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/contrib_ops/cuda/diffusion/group_norm_impl.cu
"""
_ALPHAS = {("com.microsoft", "QuickGelu"): 1.702, ("", "Swish"): 1.0}
"""Operators that are SiLU if their `alpha` is 1 -> its default."""


class GroupNorm(NamedTuple):
    """A norm of groups of the channels of x, `(N, C, H, W)`.

    Attributes:
        node: the last node of the norm.
        last: that node, or the last one of the SiLU that follows.
        x: the value that is normalised.
        gamma: C scales, or one for each group, with axes of size 1 around them.
        beta: the term that is added, in the form of gamma.
        groups: the number of groups.
        epsilon: the term that is added to the variance.
    """

    node: Node
    last: Node
    x: Ref
    gamma: Ref
    beta: Ref
    groups: int
    epsilon: float


def group_norm(matcher: Matcher, node: Node) -> GroupNorm | None:
    """Return the GroupNorm that a node is or ends, None where the fused kernel may compute something else."""
    norm = _standard(node) if operator_of(node) == "GroupNormalization" else _written(matcher, node)
    if norm is None:
        return None
    shape = matcher.shape(norm.x)
    channels = shape[1] if len(shape) == 4 else None
    if not isinstance(channels, int) or norm.groups < 1 or norm.epsilon < 0 or channels % norm.groups:
        return None
    size = channels // norm.groups
    if size % 2 or not 0 < size <= _MOST_CHANNELS:
        return None
    fitting: list[tuple[int, ...]] = [(channels, 1, 1), (1, channels, 1, 1)]
    if operator_of(node) == "GroupNormalization":
        per_channel = isinstance(node.op, OnnxNode) and node.op.version >= _PER_CHANNEL
        fitting = [(channels if per_channel else norm.groups,)]
    if any(tuple(matcher.shape(ref)) not in fitting for ref in (norm.gamma, norm.beta)):
        return None
    return norm._replace(last=_silu(matcher, node) or node)


def over_root(matcher: Matcher, node: Node) -> tuple[Ref, Ref] | None:
    """Return x and a root for a product of x and the reciprocal of the root, as in RMS norms."""
    for x, other in operands(node, "Mul"):
        root = matcher.under(other, "Reciprocal")
        if root is not None and matcher.made(root, "Sqrt") is not None:
            return x, root
    return None


def _standard(node: Node) -> GroupNorm | None:
    x, gamma, beta = (*node.inputs, None, None)[:3]
    if not isinstance(node.op, OnnxNode) or x is None or gamma is None or beta is None:
        return None
    if node.op.integer("stash_type", 1) != 1:  # f32, in which the kernel computes
        return None
    return GroupNorm(node, node, x, gamma, beta, node.op.integer("num_groups", 0), _epsilon(node.op))


def _written(matcher: Matcher, node: Node) -> GroupNorm | None:
    """Return a norm whose groups are channels of InstanceNormalization, times gamma, plus beta, its last node."""
    for product, beta in operands(node, "Add"):
        scaled = _inner(matcher, product, "Mul")
        for normal, gamma in operands(scaled, "Mul"):
            whole = _inner(matcher, normal, "Reshape")
            norm = None if whole is None else _inner(matcher, whole.inputs[0], "InstanceNormalization")
            parted = None if norm is None else _inner(matcher, norm.inputs[0], "Reshape")
            x = None if parted is None else parted.inputs[0]
            if whole is None or norm is None or parted is None or x is None or len(matcher.shape(x)) != 4:
                continue
            ones, zeros = (_filled(matcher, ref, number) for ref, number in zip(norm.inputs[1:], (1, 0), strict=True))
            batch, *rest = (matcher.place(x, axis) for axis in range(4))
            is_parted = matcher.gives(parted, [{0, batch}, {ones}, ()])  # the last size can only be -1
            is_whole = matcher.gives(whole, [{0, batch}, *({each} for each in rest)])
            if ones and ones == zeros and is_parted and is_whole and isinstance(norm.op, OnnxNode):
                return GroupNorm(node, node, x, gamma, beta, ones, _epsilon(norm.op))
    return None


def _silu(matcher: Matcher, node: Node) -> Node | None:
    """Return the node whose result is SiLU of a node's result, if nothing else reads that."""
    y = Ref(node.id)
    readers = [] if _is_output(matcher, y) else matcher.users.get(y, [])
    if len(readers) == 1 and isinstance(readers[0].op, OnnxNode):
        op = readers[0].op
        alpha = op.attributes.get("alpha", _ALPHAS.get((op.domain, op.op_type)))
        return readers[0] if alpha == 1 and (op.domain, op.op_type) in _ALPHAS else None
    gates = [each for each in readers if operator_of(each) == "Sigmoid"]
    products = [each for each in readers if operator_of(each) == "Mul"]
    if len(readers) != 2 or not gates or not products:
        return None
    gate = Ref(gates[0].id)
    return products[0] if _inner(matcher, gate, "Sigmoid") and {*products[0].inputs} == {y, gate} else None


def _inner(matcher: Matcher, ref: Ref | None, kind: str) -> Node | None:
    """Return the node of a kind that gives a value which one node reads, and which is no output."""
    alone = ref is not None and len(matcher.users.get(ref, ())) == 1 and not _is_output(matcher, ref)
    return matcher.made(ref, kind) if alone else None


def _is_output(matcher: Matcher, ref: Ref) -> bool:
    return any(value.ref == ref for value in matcher.graph.outputs)


def _filled(matcher: Matcher, ref: Ref | None, number: float) -> int:
    """Return how many elements a constant or a weight of one axis has if all are a number, 0 otherwise."""
    node = matcher.maker(matcher.bare(ref))
    data = node.op.data if node is not None and isinstance(node.op, Constant) else None
    if node is not None and isinstance(node.op, Param) and not node.op.mutable:
        data = matcher.weights.get(node.op.name)
    if data is None or len(data.shape) != 1:
        return 0
    return data.num_elements if bool((data.numpy() == number).all()) else 0


def _epsilon(op: OnnxNode) -> float:
    epsilon = op.attributes.get("epsilon", 1e-5)
    return epsilon if isinstance(epsilon, float) else -1.0
