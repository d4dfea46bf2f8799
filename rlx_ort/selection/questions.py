"""Capability queries: the distinct kinds of nodes in a model, and the provider's answer for each.

Nodes get the same answer when they share operator, version, attributes, element types, ranks and which inputs are
constant. For providers that compile, which dims are 0, 1 or open, small constants and the place between other nodes
count too. Nodes that ONNX Runtime folds before assignment need no query.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import onnx

from rlx_ort.converters.protos import nodes_of
from rlx_ort.converters.to_onnx.exported import ExportedNode, Outline
from rlx_ort.converters.to_onnx.exporter import Draft
from rlx_ort.converters.to_onnx.model import ModelAttribute, ModelGraph, ModelNode
from rlx_ort.device import Device
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData, key_of_value
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.options.compile_options import CompileOptions, OptimizationLevel
from rlx_ort.providers.asking import Question, answers_of, ask, asking_options
from rlx_ort.providers.base import Provider
from rlx_ort.selection.folding import as_compiled, folded_nodes, idle_nodes

_log = logging.getLogger(__name__)
_BUDGET_S = 10.0
"""How long a provider may be asked about one graph; OpenVINO takes 10 ms a question."""

_LONG_KEY = 160
_SMALL_VALUES = 16
_COUNTING = frozenset({DType.I32, DType.I64})


@dataclass(slots=True)
class NodeGroup:
    """Nodes of a model that get the same answer; `key` holds all that it depends on, as text.

    `pattern` is the part of the first that equal nodes share. `constants` maps the places of its constant inputs to
    their data, None where only the type is known; `computed` has the places of its inputs that other nodes compute.
    `used` means that other nodes read its first output, so that ONNX Runtime may drop it.
    """

    key: str
    pattern: ModelNode
    nodes: list[ExportedNode] = field(default_factory=list)
    constants: Mapping[int, TensorData | None] = field(default_factory=dict)
    computed: tuple[int, ...] = ()
    used: bool = False


def groups_of(
    draft: Draft,
    options: CompileOptions,
    *,
    whole: bool,
    shapes: bool,
    weights: Mapping[str, TensorData] = MappingProxyType({}),
) -> list[NodeGroup]:
    """Return the groups of nodes that a device has to take.

    Without optimisation nothing is folded. `whole` is true for a provider that compiles: then the values of small
    constants and static sizes matter as well, and bodies go with the node they belong to. `weights` has the data of
    parameters, as far as it is known; it matters to these providers. With `shapes`, nodes that only compute shapes
    count: on the CPU, which runs them for every other device.
    """
    outline, constants = as_compiled(draft, weights, options) if whole else (draft.outline, draft.outline.constants)
    folded = folded_nodes(outline, options).keys() | idle_nodes(outline, options)
    names = constants.keys()
    written = {name for node in outline.nodes for name in node.output_names} - names if whole else set()
    groups: dict[object, list[ExportedNode]] = {}  # properties that matter -> nodes that share them
    by_key: dict[str, NodeGroup] = {}
    for node in outline.nodes:
        pattern, _, _, name, input_names, _ = node
        if folded and name in folded:
            continue
        look: object = pattern
        constant: tuple[bool, ...] = ()
        values: tuple[str, ...] | None = None
        if names and not names.isdisjoint(input_names):
            constant = tuple([name in constants for name in input_names])
            values = tuple([_small(constants.get(name)) for name in input_names]) if whole else None
            look = (pattern, constant, values)
        computed: tuple[int, ...] = ()
        used = False
        if whole and options.optimization is not OptimizationLevel.OFF:
            computed = tuple([place for place, name in enumerate(input_names) if name in written])
            used = node.output_names[0] not in outline.output_types
            look = (look, computed, used)
        nodes = groups.get(look)
        if nodes is None:
            if (pattern.shape_only and not shapes) or (whole and pattern.body):
                nodes = []  # no question
            else:
                key = _key(pattern, constant, values, whole)
                if computed or used:
                    key += f" from {computed} " + "inside" * used
                group = by_key.get(key)
                if group is None:
                    group = by_key[key] = NodeGroup(key, pattern, [], _constants(node, constants), computed, used)
                nodes = group.nodes
            groups[look] = nodes
        nodes.append(node)
    return list(by_key.values())


def answers_for(
    provider: Provider, device: Device, groups: Sequence[NodeGroup], draft: Draft, options: CompileOptions
) -> dict[str, str]:
    """Return the provider's answer to each group by its key, asked now or earlier; nothing if it cannot be asked.

    The device works here. New questions open small sessions, in a child process for providers that compile.
    """
    scope = provider.question_scope(device)
    if scope is None or not groups:
        return {}
    asked_with = asking_options(options)
    extra = sorted(asked_with.provider_options.items())
    store = answers_of(f"{scope}; {device.label}; {options.precision.value}; {extra}")
    known = store.known([group.key for group in groups])
    missing = [group for group in groups if group.key not in known]
    if missing:
        model = draft.finished().model
        questions = list(questions_of(missing, draft.outline, model))
        answers = ask(provider, device, questions, model, asked_with, _BUDGET_S)
        if len(answers) < len(missing):
            _log.info("%s: %d questions have no answer", device.display, len(missing) - len(answers))
        if answers:
            store.keep(answers)
        known.update(answers)
    return known


def questions_of(groups: Sequence[NodeGroup], outline: Outline, model: onnx.ModelProto) -> Iterator[Question]:
    """Yield the question of each group; its node is that of the finished model."""
    from rlx_ort.converters.from_onnx.structure import names_read

    wanted = {group.nodes[0].name for group in groups}
    protos = {node.name: node for node in nodes_of(model, functions=False) if node.name in wanted}
    for group in groups:
        node = protos[group.nodes[0].name]
        captured = list(names_read(node))[sum(map(bool, node.input)) :]  # by its bodies
        outer = {name: outline.types[name] for name in captured if name in outline.types}
        pattern = group.pattern
        yield Question(
            group.key, node, pattern.inputs, pattern.outputs, group.constants, outer, group.computed, group.used
        )


def _key(pattern: ModelNode, constant: Sequence[bool], values: Sequence[str] | None, sized: bool) -> str:
    inputs = [_look(kind, sized=sized) for kind in pattern.inputs]
    for place, is_constant in enumerate(constant):
        if is_constant:
            inputs[place] += f"={values[place]}" if values is not None and values[place] else "c"
    attributes = "".join([f" {each}" for each in _attributes(pattern)])
    outputs = ", ".join([_look(kind, sized=sized) for kind in pattern.outputs])
    operator = f"{pattern.domain or 'ai.onnx'}::{pattern.op_type}-{pattern.version}"
    key = f"{operator}{attributes} ({', '.join(inputs)}) -> ({outputs})"
    if pattern.shape_only:
        key += " shapes"
    bodies = _bodies(pattern)
    if len(key) > _LONG_KEY or bodies:
        key = f"{key[:_LONG_KEY]} {hashlib.sha256(f'{key} {bodies}'.encode()).hexdigest()[:24]}"
    return key


def _look(kind: ValueType | None, *, sized: bool) -> str:
    if isinstance(kind, TensorType):
        shape = kind.shape
        if shape is None:
            return f"{kind.dtype.value}:?"
        if not sized:
            return f"{kind.dtype.value}:{len(shape)}"
        exact = kind.dtype in _COUNTING and len(shape) == 1  # axes and shapes, whose length is another rank
        dims = ["?" if not isinstance(dim, int) else str(dim) if exact or dim < 2 else "n" for dim in shape]
        return f"{kind.dtype.value}[{','.join(dims)}]"
    return "-" if kind is None else str(kind)


def _attributes(pattern: ModelNode) -> list[str]:
    given = pattern.attributes
    return [f"{name}={_attribute(given[name])}" for name in sorted(given)] if given else []


def _attribute(attribute: ModelAttribute) -> str:
    return "body" if attribute.kind.startswith("GRAPH") else key_of_value(attribute.value)


def _bodies(pattern: ModelNode) -> str:
    """Return the operators and attributes in the bodies of a node, without names of nodes and values."""
    owned = [attribute for attribute in pattern.attributes.values() if attribute.kind.startswith("GRAPH")]
    graphs = [graph for each in owned for graph in (each.value if each.kind == "GRAPHS" else [each.value])]
    nodes = [node for graph in graphs if isinstance(graph, ModelGraph) for node in graph.nodes]
    return "; ".join(f"{node.domain}::{node.op_type} {' '.join(_attributes(node.pattern))}" for node in nodes)


def _small(data: object) -> str:
    if isinstance(data, TensorData) and data.num_elements <= _SMALL_VALUES:
        return str(data.numpy().reshape(-1).tolist())
    return ""


def _constants(node: ExportedNode, constants: Mapping[str, object]) -> dict[int, TensorData | None]:
    read = {place: constants[name] for place, name in enumerate(node.input_names) if name in constants}
    return {place: data if isinstance(data, TensorData) else None for place, data in read.items()}
