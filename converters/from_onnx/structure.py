"""Checks a model before it is walked: names, nesting, schemas. Sorts nodes that are out of order, refuses cycles.

A node must follow the schema of its operator, and have no attribute value that ends or blocks the process.
"""

from __future__ import annotations

import functools
import heapq
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from rlx_ort.converters.onnx_types import schema_of
from rlx_ort.converters.protos import bodies_of, trimmed
from rlx_ort.errors import ConversionError

if TYPE_CHECKING:
    import onnx

MAX_DEPTH = 30
"""How deep bodies and function calls may be nested: protobuf reads and copies no more than 32 levels of bodies."""

_MAX_NODES = 2_000_000
_MAX_OPSET = 1_000_000  # custom domains number as they like
_INT, _INTS = 2, 7  # AttributeProto.INT and INTS
_INT32 = 1 << 31
_WIDE = {"default_int64", "end", "ignore_index", "replaced_value_int64", "start", "value_int"}  # attributes of 64 bits
_LARGEST_WINDOW = 1 << 24  # AveragePool also adds up what auto_pad puts around an image
# Sizes that something is divided by, or that index without a check, in ONNX's inference or ONNX Runtime 1.31's kernels.
_LEAST = {
    "batch_dims": 0, "block_size": 0, "blocksize": 1, "dilations": 1, "group": 1, "hidden_size": 1, "kernel_shape": 1,
    "kv_num_heads": 1, "num_groups": 1, "num_outputs": 1, "offset_group": 1, "q_num_heads": 1, "strides": 1,
}  # fmt: skip
_SCOPES = "pkg.torch.onnx.name_scopes"
_NOWHERE = "_empty_nn_module_stack_from_metadata_hook"  # the exporter's word for a node that it made itself
_QUOTED = re.compile(r"'([^']*)'")


def check_model(model: onnx.ModelProto) -> None:
    """Raise unless a model can be walked: ONNX's own shape inference, which comes next, does not defend itself.

    Raises:
        ConversionError: a name is no text, bodies are nested too deep, functions call each other in a circle or too
            often, or a node's inputs, outputs or attributes are not those of its operator.
    """
    import onnx

    for entry in (*model.opset_import, *(entry for f in model.functions for entry in f.opset_import)):
        _check_texts("the opset imports", (entry.domain,))
        newest = _MAX_OPSET if domain_of(entry.domain) else onnx.defs.onnx_opset_version()
        if not 0 < entry.version <= newest:
            raise ConversionError(
                f"the model imports opset {entry.version} of {entry.domain or 'ai.onnx'!r}; the newest here is {newest}"
            )
    entries = (text for entry in model.metadata_props for text in (entry.key, entry.value))
    _check_texts("the model's description", (model.doc_string, model.graph.doc_string, *entries))
    imported = opsets_of(model, model.opset_import)
    for function in model.functions:
        names = (*function.input, *function.output, *function.attribute, *(a.name for a in function.attribute_proto))
        _check_texts("a function", (function.domain, function.name, function.overload, *names))
        if not all((function.name, *names)):
            raise ConversionError(f"function {function.name!r} has an input, output or attribute without a name")
        domain = domain_of(function.domain)
        if domain in imported and schema_of(function.name, imported[domain], domain) is not None:
            raise ConversionError(
                f"function {function.name!r} has the name of an operator of {domain or 'ai.onnx'}, and runtimes differ "
                "in which of the two they run; rename the function"
            )
    functions = {(domain_of(f.domain), f.name, f.overload): f for f in model.functions}
    sizes: dict[tuple[str, str, str], int] = {}
    open_calls: list[tuple[str, str, str]] = []

    def size_of(nodes: Iterable[onnx.NodeProto], depth: int, opsets: Mapping[str, int]) -> int:
        total = 0
        for node in nodes:
            if depth > MAX_DEPTH:
                raise ConversionError(f"{node_label(node)} stands in bodies nested more than {MAX_DEPTH} deep")
            inputs, outputs, attributes = [*node.input], [*node.output], [*node.attribute]
            key = (domain_of(node.domain), node.op_type, node.overload)
            names = [attribute.name for attribute in attributes]
            refs = [attribute.ref_attr_name for attribute in attributes]
            _check_texts(node, (*key, node.name, *inputs, *outputs, *names, *refs))
            if len({*names}) != len(names):
                raise ConversionError(f"{node_label(node)} has an attribute twice: {', '.join(sorted(names))}")
            if key in functions:
                total += function_size(key, node)
            else:
                total += 1
                signature = signature_of(node.op_type, opsets[key[0]], key[0]) if key[0] in opsets else None
                given = dict(zip(names, attributes, strict=True))
                if signature is not None and (problem := signature.problem(inputs, outputs, given)):
                    raise ConversionError(f"{node_label(node)} {problem}")
            if attributes:
                for body in bodies_of(node):
                    _check_graph(body)
                    total += size_of(body.node, depth + 1, opsets)
        return total

    def function_size(key: tuple[str, str, str], node: onnx.NodeProto) -> int:
        if key in open_calls or len(open_calls) > MAX_DEPTH:
            chain = " -> ".join(name for _, name, _ in open_calls)
            how = "calls itself" if key in open_calls else "is called too deep,"
            raise ConversionError(f"{node_label(node)} {how} through {chain}")
        if key not in sizes:
            open_calls.append(key)
            sizes[key] = 1 + size_of(functions[key].node, 0, opsets_of(model, functions[key].opset_import))
            open_calls.pop()
        return sizes[key]

    _check_graph(model.graph)
    total = size_of(model.graph.node, 0, imported)
    if total > _MAX_NODES:
        raise ConversionError(f"the model has {total} nodes once its functions are inlined, above {_MAX_NODES}")


def domain_of(name: str) -> str:
    """Return a domain as the IR writes it: that of ai.onnx is empty."""
    return "" if name == "ai.onnx" else name


def opsets_of(model: onnx.ModelProto, imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Return domain -> version of some opset imports of a model."""
    opsets = {domain_of(entry.domain): entry.version for entry in imports}
    if model.ir_version < 3:  # before IR version 3 there was nothing to declare
        opsets.setdefault("", 1)
    return opsets


def _check_graph(graph: onnx.GraphProto) -> None:
    infos = (info.name for info in (*graph.input, *graph.output, *graph.value_info))
    tensors = (*graph.initializer, *(tensor.values for tensor in graph.sparse_initializer))
    _check_texts("a graph", (graph.name, *infos, *(tensor.name for tensor in tensors)))
    for tensor in tensors:
        if any(size < 0 for size in tensor.dims):
            raise ConversionError(f"tensor {tensor.name!r} of shape {[*tensor.dims]} is not a whole tensor")


def _check_texts(owner: str | onnx.NodeProto, texts: Iterable[object]) -> None:
    """Raise unless every text is one; protobuf gives bytes for text that is no UTF-8."""
    if {*map(type, texts)} <= {str}:
        return
    label = owner if isinstance(owner, str) else node_label(owner)
    raise ConversionError(f"{label} has a name that is not UTF-8 text: the model is damaged")


def node_label(node: onnx.NodeProto) -> str:
    """Return how messages name a node: by its name, or by its results."""
    op_type = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    if node.name:
        return f"node {node.name!r} ({op_type})"
    outputs = ", ".join(repr(name) for name in node.output if name)
    return f"the {op_type} node that computes {outputs or 'nothing'}"


def module_path(node: onnx.NodeProto) -> str:
    """Return the dotted path of the module that a node was exported from, as PyTorch's exporter notes it, or "".

    The note is a list of Python: the path of each module around the node, the outermost first, then the node itself.
    """
    note = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "")
    paths: list[str] = _QUOTED.findall(note)
    return paths[-2] if len(paths) > 1 and paths[-2] != _NOWHERE else ""


def sorted_nodes(nodes: Iterable[onnx.NodeProto], known: Iterable[str], where: str) -> list[onnx.NodeProto]:
    """Return nodes in an order in which each reads only known values or earlier results; as given where possible.

    Names that neither `known` nor `nodes` define are accepted: they may be captured from outside.

    Raises:
        ConversionError: a name is defined twice, or nodes depend on each other in a circle.
    """
    nodes = list(nodes)
    defined = set(known)
    producer: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in defined or name in producer:
                raise ConversionError(f"{node_label(node)} in {where} defines {name!r}, which is already defined")
            producer[name] = index
    needs = [{producer[name] for name in names_read(node) if name in producer} for node in nodes]
    if all(all(need < index for need in wanted) for index, wanted in enumerate(needs)):
        return nodes
    sorter = TopologicalSorter(dict(enumerate(needs)))
    try:
        sorter.prepare()
    except CycleError as err:
        stuck = node_label(nodes[err.args[1][0]])
        raise ConversionError(f"{stuck} in {where} depends on its own result: the graph has a cycle") from err
    order: list[int] = []
    ready: list[int] = []
    while sorter.is_active():
        for index in sorter.get_ready():
            heapq.heappush(ready, index)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return [nodes[index] for index in order]


def names_read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names a node reads, those that its bodies capture included."""
    yield from filter(None, node.input)
    for body in bodies_of(node):
        own = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
        own |= {tensor.values.name for tensor in body.sparse_initializer}
        own |= {name for inner in body.node for name in inner.output}
        for inner in body.node:
            yield from (name for name in names_read(inner) if name not in own)
        yield from (value.name for value in body.output if value.name not in own)


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and attributes of an operator, by its schema.

    `inputs` and `outputs` are the least and largest number of each. A node must not leave out the inputs at the places
    `single`. From the place `many` on, any number of inputs follows, none of them left out; it is negative if there is
    no such place. `kinds` maps an attribute to the number of its type.
    """

    label: str
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    single: tuple[int, ...]
    many: int
    kinds: Mapping[str, int]
    required: frozenset[str]

    def problem(
        self, inputs: Sequence[str], outputs: Sequence[str], attributes: Mapping[str, onnx.AttributeProto]
    ) -> str:
        """Return how a node breaks the schema, empty if it does not; absent values at the end are allowed."""
        for what, names, (least, most) in (("inputs", inputs, self.inputs), ("outputs", outputs, self.outputs)):
            count = len(names)
            if count > most:
                count = len(trimmed(names))
            if not least <= count <= most:
                return f"has {count} {what}; {self.label} takes {least} to {most}"
        if "" in inputs:
            count = len(trimmed(inputs))
            needed = (*self.single, *(range(self.many, count) if self.many >= 0 else ()))
            absent = [place for place in needed if place < len(inputs) and not inputs[place]]
            if absent:
                return f"leaves out input {absent[0]}, which {self.label} needs"
        for name, attribute in attributes.items():
            wanted, given = self.kinds.get(name), attribute.type
            if wanted is None:
                if not name.startswith("__"):  # reserved for whoever wrote the model
                    return f"has attribute {name!r}; {self.label} has {', '.join(sorted(self.kinds)) or 'none'}"
            elif given != wanted:
                return f"has attribute {name!r} as {_kind_name(given)}; {self.label} takes it as {_kind_name(wanted)}"
            elif given in (_INT, _INTS) and not attribute.ref_attr_name and (problem := value_problem(attribute)):
                return problem
            elif name == "num_outputs" and attribute.i != len(outputs) and not attribute.ref_attr_name:
                return f"has {len(outputs)} outputs and num_outputs={attribute.i}"
        if not self.required <= attributes.keys():
            return f"has no attribute {', '.join(self.required - attributes.keys())}; {self.label} needs it"
        return ""


@functools.cache
def signature_of(op_type: str, version: int, domain: str) -> Signature | None:
    """Return the signature of an operator, None where there is no schema that is in force."""
    schema = schema_of(op_type, version, domain)
    if schema is None or schema.deprecated:
        return None
    from onnx import AttributeProto

    number_of = AttributeProto.AttributeType.Value
    # onnx's enumerations are spelled AttrType.INT and FormalParameterOption.Single.
    options = [str(formal.option).rpartition(".")[2] for formal in schema.inputs]
    kinds = {name: number_of(str(item.type).rpartition(".")[2]) for name, item in schema.attributes.items()}
    return Signature(
        f"{op_type} of {domain or 'ai.onnx'} {version}",
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        tuple(place for place, option in enumerate(options) if option == "Single"),
        options.index("Variadic") if "Variadic" in options else -1,
        kinds,
        frozenset(name for name, attribute in schema.attributes.items() if attribute.required),
    )


def value_problem(attribute: onnx.AttributeProto) -> str:
    """Return the problem of an attribute's whole numbers, empty if there is none."""
    name = attribute.name
    if attribute.type == _INT and name not in _WIDE and not -_INT32 <= attribute.i < _INT32:
        return f"has attribute {name!r} = {attribute.i}, which is beyond 32 bits"
    least = _LEAST.get(name)
    if least is None:
        return ""
    numbers = [attribute.i] if attribute.type == _INT else [*attribute.ints]
    wrong = [number for number in numbers if number < least]
    if name == "kernel_shape" and not wrong and math.prod(numbers) > _LARGEST_WINDOW:
        return f"has attribute {name!r} = {numbers}, a window of more than {_LARGEST_WINDOW} elements"
    return f"has attribute {name!r} with {wrong[0]}, which must be {least} at least" if wrong else ""


def _kind_name(number: int) -> str:
    from onnx import AttributeProto

    known = AttributeProto.AttributeType
    return str(known.Name(number)) if number in known.values() else f"type {number}"
