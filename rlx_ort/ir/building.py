"""Makes the builders of `Graph`: from the class line of an op, or from a function of the op's family.

The class line `class Cumsum(Op, operands="x:number", builder="cumsum input axis exclusive reverse")` has the name of a
method and its parameters. Those that are fields are attributes of the op, the others its operands in order. Without
any, they are all operands, then all fields. Several builders of an op are apart by `;`. A parameter may be

- `kind:function`, another name for the field `function`;
- `beta!`, one that has no default; others have that of the field, and None for an operand that may be left out;
- `bias?`, an operand that may be left out though others follow; the field `has_bias` says whether it is there;
- `beta:zeros`, an operand that is zeros like the one before when it is left out;
- `bias:cast`, an operand that is cast to the dtype of the first one;
- `n@a`, a field that is the size of the last dimension of the operand `a` when it is left out;
- `*`, after which parameters are keywords;
- `out_shape`, `output_shape` or `dtype`, where these are no fields: the declared type of the result;
- `kernel`, where it is no field: the size of the window, with which that of the weight is compared;
- `mask_kind=custom`, which is no parameter but the value of a field.

Numbers and lists take the dtype of the first operand, but for operands that have one of their own by the class line,
such as `indices` and `own`. Those with the rule `cast` are cast to it. An op whose class says `promotes` gets two
operands of the dtype that `promote` names. Attributes are taken as people write them: one number for a window, an
iterable for a tuple, the name of a dtype.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from inspect import Parameter, Signature
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.builders import Builders
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, counts

F = TypeVar("F", bound=Callable[..., Any])
_DECLARED = {
    "out_shape": ("shape", "Iterable[Dim] | None"),
    "output_shape": ("shape", "Iterable[Dim] | None"),
    "dtype": ("dtype", "DType | str | None"),
    "kernel": ("kernel", "Sizes | None"),
}
"""Parameter that is no field -> its role and its type."""
_WINDOWS = ("tuple[int, int]", "tuple[int, int, int]")
_SHARED_RULES = ("", "float", "number", "cast")  # of operands that take the dtype of the first one


class _Part(NamedTuple):
    """What a parameter becomes: `target` is a field, or the place of an operand; `size_of` that of a field's `n@a`."""

    role: str  # operand, zeros, cast, field, shape, dtype or kernel
    target: Any
    size_of: int | None = None


def builder(function: F) -> F:
    """Make a function, which gets the graph first, a method of all graphs; it stays a function as well."""
    setattr(Builders, function.__name__, function)
    return function


def preset(base: Callable[..., Any], argument: str, **docs: str) -> None:
    """Add builders, given by name and docstring, that are another one with its first argument set."""

    def method(self: Any, /, *args: Any, **keywords: Any) -> Any:
        return base(self, argument, *args, **keywords)

    first, _, *others = inspect.signature(base).parameters.values()
    for name, doc in docs.items():
        _add(method, name, doc, inspect.signature(base).replace(parameters=[first, *others]))


def add_builders(*ops: type[Op]) -> None:
    """Add the builders that the class lines of ops declare."""
    for op in ops:
        for text in filter(None, op.__dict__.get("builders", "").split(";")):
            name, *words = text.split()
            known = {item.name: item for item in fields(op)}
            parts, signature, fixed = _parsed(op, words or [*op.operands, *known], known)
            _add(_method(op, parts, signature, fixed, known), name, _doc(op), signature)


def _method(
    op: type[Op],
    parts: Mapping[str, _Part],
    signature: Signature,
    fixed: Mapping[str, Any],
    known: Mapping[str, Field[Any]],
) -> Any:
    rules, zeros = dict(op._rules), {part.target for part in parts.values() if part.role == "zeros"}
    rules |= {part.target: "cast" for part in parts.values() if part.role == "cast"}
    sizes = {part.target: part.size_of for part in parts.values() if part.size_of is not None}

    def method(self: Any, /, *args: Any, **keywords: Any) -> Any:
        bound = signature.bind(self, *args, **keywords)
        bound.apply_defaults()
        attributes, values, declared = dict(fixed), dict[int, Any](), dict[str, Any](bound.arguments.pop("node", ()))
        for name, value in bound.arguments.items():
            part = parts.get(name) or _Part(name, name)
            if part.role in ("operand", "zeros", "cast"):
                values[part.target] = value
            elif part.role == "field":
                attributes[part.target] = _taken(known[part.target], value)
            elif part.role != "self":
                declared[part.role] = value
        attributes |= {f"has_{name}": bound.arguments[name] is not None for name in parts if f"has_{name}" in known}
        for name, place in sizes.items():
            if attributes[name] is None:
                values[place] = self._as_value(values[place], None if not place else self._as_value(values[0]))
                attributes[name] = last_size(values[place], name)
        made, kernel = op(**attributes), declared.pop("kernel", None)
        if op.promotes:
            values = dict(enumerate(self._pair(*values.values())))
        elif len(values) > 1:
            first = values[0] = self._as_value(values[0])
            for place, value in values.items():
                rule = rules.get(place, "")
                if value is None and place in zeros:
                    value = self.constant(np.zeros(values[place - 1].shape.static()), values[place - 1].dtype)
                if place and value is not None and rule in _SHARED_RULES:
                    like = self._as_value(value, first)
                    values[place] = like.cast(first.dtype) if rule == "cast" else like
        if kernel is not None and tuple(values[1].shape[2:]) != counts("kernel", kernel, 2, 1):
            shape = values[1].shape
            raise GraphVerifyError(f"{op.kind} is declared with kernel {kernel}, its weight has shape {shape}")
        return self._add(made, *values.values(), **declared)

    return method


def last_size(value: Any, name: str) -> int:
    """Return the size of the last dimension of a value, which the field of that name is when it is left out."""
    size = value.shape[-1] if value.rank else None
    if not isinstance(size, int):
        raise GraphVerifyError(f"{value.name!r} {value.shape} has no size in its last dimension; give {name}")
    return size


def _add(method: Any, name: str, doc: str, signature: Signature) -> None:
    method.__name__, method.__qualname__, method.__doc__ = name, f"Builders.{name}", doc
    method.__signature__ = signature  # help() and the stubs read it
    setattr(Builders, name, method)


def _doc(op: type[Op]) -> str:
    """Return the docstring of an op as that of its builder."""
    text = inspect.cleandoc(op.__doc__ or "")
    word = text.split(maxsplit=1)[0]
    return f"Return {text[0].lower() if word.isalpha() and word.istitle() else text[0]}{text[1:]}"


def _parsed(
    op: type[Op], words: Iterable[str], known: Mapping[str, Field[Any]]
) -> tuple[dict[str, _Part], Signature, dict[str, Any]]:
    """Return the part of each parameter, the signature, and the fields whose value is fixed."""
    parts: dict[str, _Part] = {}
    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    fixed: dict[str, Any] = {}
    kind: Any = Parameter.POSITIONAL_OR_KEYWORD
    place = 0
    for word in words:
        if word == "*":
            kind = Parameter.KEYWORD_ONLY
            continue
        if "=" in word:
            name, _, fixed[name] = word.partition("=")
            continue
        name, _, target = word.rstrip("!?").partition(":")
        name, _, operand = name.partition("@")
        item, default = known.get(target or name), None
        if item is not None and operand:
            parts[name], text = _Part("field", name, op.operands.index(operand)), f"{_accepted(item)} | None"
        elif item is not None:
            parts[name], text, default = _Part("field", item.name), _accepted(item), item.default
        elif name in _DECLARED:
            role, text = _DECLARED[name]
            parts[name] = _Part(role, name)
        else:
            optional = target == "zeros" or word.endswith("?") or (place >= op.arity[0] and not word.endswith("!"))
            parts[name], text = _Part(target or "operand", place), f"Operand{' | None' * optional}"
            default = None if optional else MISSING
            place += 1
        missing = word.endswith("!") or default is MISSING
        parameters.append(Parameter(name, kind, default=Parameter.empty if missing else default, annotation=text))
    required = False
    for at, parameter in reversed([*enumerate(parameters)]):  # a default before a parameter without one is none
        if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD:
            required = required or parameter.default is Parameter.empty
            parameters[at] = parameter.replace(default=Parameter.empty) if required else parameter
    if "shape" in parts or any(part.role in ("shape", "dtype") for part in parts.values()):
        parameters.append(Parameter("name", Parameter.KEYWORD_ONLY, default=None, annotation="str | None"))
    else:
        parameters.append(Parameter("node", Parameter.VAR_KEYWORD, annotation="Unpack[NodeArgs]"))
    return parts, Signature(parameters, return_annotation="Value"), fixed


def _accepted(item: Field[Any]) -> str:
    """Return the type that a builder takes for a field, as text."""
    kind = str(item.type)
    if kind in _WINDOWS:
        return "Sizes"
    if kind in ("tuple[int, ...]", "tuple[float, ...]"):
        return f"{kind[6:-6]} | Iterable[{kind[6:-6]}]"
    return f"Iterable[{kind[6:-6]}]" if kind.startswith("tuple[") else kind.replace("DType", "DType | str")


def _taken(item: Field[Any], value: Any) -> Any:
    """Return the value of a field from that of a builder's parameter."""
    kind = str(item.type)
    if kind in _WINDOWS:
        return counts(item.name, value, kind.count("int"), int("padding" not in item.name))
    if kind in ("tuple[int, ...]", "tuple[float, ...]"):
        items = value if isinstance(value, Iterable) else (value,)
        return tuple(map(int if "int" in kind else float, items))
    if kind.startswith("tuple["):
        return tuple(value)
    return DType.parse(value) if value is not None and "DType" in kind else value
