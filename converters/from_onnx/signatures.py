"""The schema that a node must follow, and attribute values that end or block the process."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx_ort.converters.onnx_types import schema_of
from rlx_ort.converters.protos import trimmed

if TYPE_CHECKING:
    import onnx

_INT, _INTS = 2, 7  # AttributeProto.INT and INTS
_INT32 = 1 << 31
_WIDE = {"default_int64", "end", "ignore_index", "replaced_value_int64", "start", "value_int"}  # attributes of 64 bits
_LARGEST_WINDOW = 1 << 24  # AveragePool also adds up what auto_pad puts around an image
# Sizes that something is divided by, or that index without a check, in ONNX's inference or ONNX Runtime 1.31's kernels.
_LEAST = {
    "batch_dims": 0, "block_size": 0, "blocksize": 1, "dilations": 1, "group": 1, "hidden_size": 1, "kernel_shape": 1,
    "kv_num_heads": 1, "num_groups": 1, "num_outputs": 1, "offset_group": 1, "q_num_heads": 1, "strides": 1,
}  # fmt: skip


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
