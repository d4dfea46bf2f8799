"""Asking a provider which nodes it takes: one small session with each node once, whose assignment is read back.

A kernel list has operators and element types; attributes, ranks and constant inputs decide as well, and compiling
providers have no list. So each node is put into a model with inputs of its own, without optimisation, which would fold
or fuse it away. Opening such a session takes 0.2 ms on the CPU, 0.7 ms on WebGPU and about 10 ms on OpenVINO (ONNX
Runtime 1.31.1).

Providers that compile are asked in a child process (`asking_child.py`), since some nodes end the process (QNN 2.7.0).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import pkgutil
import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from rlx_ort import kept
from rlx_ort.converters.onnx_types import dtype_of, elem_type, refer, tensor_proto, type_proto
from rlx_ort.converters.protos import bodies_of
from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError, RlxError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType, UnknownType, ValueType
from rlx_ort.options.compile_options import CacheUse, CompileOptions, OptimizationLevel, Precision
from rlx_ort.providers.asking_child import ask_in_child
from rlx_ort.providers.base import Provider, SessionRequest
from rlx_ort.providers.registry import register_provider
from rlx_ort.storage import cache_root

_NEIGHBOUR = "neighbour_"
_TOGETHER = 64  # nodes a session: opening one costs as much as some twenty nodes
_PARTS = 8  # sessions that a refused one is split into
_REASON_CHARACTERS = 300
_NUMBERED = re.compile(r"\bq(\d+)\b")

_SCHEMA = 1
_LOCK_TIMEOUT_S = 10.0

DEVICE, HELPED = "device", "cpu"
"""The provider takes the node; the CPU takes it instead. Any other answer is the reason of a refusal."""


@dataclass(frozen=True)
class Question:
    """One node to ask about; all nodes with its `key` get the same answer.

    Types of absent inputs and outputs are None. `constants` maps the places of constant inputs to their data, None
    where only the type is known; `computed` has the places of inputs that other nodes compute. `outer` has the outer
    values that its bodies read. `used` means that other nodes read its first output.
    """

    key: str
    node: onnx.NodeProto
    inputs: tuple[ValueType | None, ...]
    outputs: tuple[ValueType | None, ...]
    constants: Mapping[int, TensorData | None] = field(default_factory=dict)
    outer: Mapping[str, ValueType] = field(default_factory=dict)
    computed: tuple[int, ...] = ()
    used: bool = False


def ask(
    provider: Provider,
    device: Device,
    questions: Sequence[Question],
    model: onnx.ModelProto,
    options: CompileOptions,
    budget_s: float,
) -> dict[str, str]:
    """Return the answer to each question by its key, without those that were not reached within the budget.

    The device works here. Keys are unique. `model` is the one of the nodes, for its opsets and functions; sessions are
    opened with `options`, none after `budget_s` seconds.
    """
    askable = [
        question
        for question in questions
        if not any(isinstance(kind, UnknownType) for kind in (*question.inputs, *question.outer.values()))
    ]
    if provider.compiles:
        return _ask_compiler(provider, device, {each.key: _sheets(each, model) for each in askable}, options, budget_s)
    deadline = time.monotonic() + budget_s
    answers: dict[str, str] = {}
    doubtful = {
        question.key
        for question in askable
        for kind in (*question.inputs, *question.outputs)
        if isinstance(kind, TensorType) and kind.dtype in provider.doubtful_dtypes
    }
    if doubtful and all(_computes(provider, device, dtype, options) for dtype in provider.doubtful_dtypes):
        doubtful.clear()
    alone = [question for question in askable if question.outer or question.key in doubtful]
    together = [question for question in askable if question not in alone]
    together.sort(key=lambda question: (question.node.domain, question.node.op_type))
    groups = [together[at : at + _TOGETHER] for at in range(0, len(together), _TOGETHER)]
    groups += [[question] for question in alone]
    while groups and time.monotonic() < deadline:
        group = groups.pop()
        try:
            verdicts = _ask_sheet(provider, device, _sheet(group, model), options, run=group[0].key in doubtful)
        except DeviceUnavailableError:
            break
        except RlxError as err:
            if len(group) == 1:
                answers[group[0].key] = _short_reason(err)
            else:
                groups += _split(group, str(err))
            continue
        for question, answer in zip(group, verdicts, strict=True):
            if answer:
                answers[question.key] = answer
            else:
                groups.append([question])
    return answers


def _ask_sheet(
    provider: Provider, device: Device, proto: onnx.ModelProto, options: CompileOptions, *, run: bool = False
) -> list[str]:
    """Return the answer to each node of a sheet; opens one session, runs it once if asked to, and closes it.

    The nodes of functions that ONNX Runtime expands have no names, so the answer to a function is empty unless it
    is alone on its sheet. A refusal of one node raises an `RlxError` for the sheet, and so does a failed run.
    """
    nodes = tuple(
        ExportedNode.of(node.name, node.domain, node.op_type, 0, at, (), (), tuple(node.input), tuple(node.output))
        for at, node in enumerate(proto.graph.node)
    )
    weights = _outside(proto)
    model = ExportedModel(proto, tuple(weights), nodes, {}, {})
    takers: list[set[str]] = [set() for _ in nodes]
    bodies = any(True for node in proto.graph.node for _ in bodies_of(node))
    with contextlib.closing(provider.open(SessionRequest(device, model, weights, options))) as session:
        for assigned in session.assignments:
            node = nodes[0] if len(nodes) == 1 and not bodies else model.node_of(assigned.name)
            if node is not None:
                takers[node.origin].add(assigned.provider)
        if len(nodes) == 1 and not takers[0]:  # eliminated, or expanded with its bodies
            takers[0].update(assigned.provider for assigned in session.assignments)
        if run and takers[0] == {provider.ep_name}:
            feeds = {}
            for value in proto.graph.input:  # ones, and 1 for dims without a size
                tensor = value.type.tensor_type
                shape = [dim.dim_value if dim.HasField("dim_value") else 1 for dim in tensor.shape.dim]
                feeds[value.name] = np.ones(shape, dtype_of(tensor.elem_type).numpy)
            session.run([value.name for value in proto.graph.output], feeds)
    nothing = DEVICE if len(nodes) == 1 else ""
    return [(DEVICE if providers == {provider.ep_name} else HELPED) if providers else nothing for providers in takers]


def asking_options(options: CompileOptions) -> CompileOptions:
    """Return the options to ask with: the caller's arithmetic and provider options, and nothing that costs time."""
    return CompileOptions(
        precision=options.precision,
        optimization=OptimizationLevel.OFF,
        provider_options=options.provider_options,
        custom_op_libraries=options.custom_op_libraries,
        intra_op_threads=1,
        cache=CacheUse.OFF,
        session_config={"session.disable_prepacking": "1"},
    )


def answer_tasks() -> None:
    """Answer the tasks on standard input, one a line; the child process runs this."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the output of libraries is not an answer
    providers: dict[str, Provider] = {}
    for line in sys.stdin.buffer:
        task = json.loads(line)
        wanted = task["provider"]
        if wanted not in providers:
            providers[wanted] = pkgutil.resolve_name(wanted)()
            register_provider(providers[wanted])
        options = CompileOptions(
            precision=Precision(task["precision"]),
            provider_options=task["provider_options"],
            custom_op_libraries=tuple(task["custom_op_libraries"]),
        )
        print(json.dumps({"ready": providers[wanted].name}), file=out, flush=True)
        for key, *texts in task["sheets"]:
            sheets = [onnx.ModelProto.FromString(base64.b64decode(text)) for text in texts]
            answer = _answer(providers[wanted], Device(task["device"]), sheets, asking_options(options))
            print(json.dumps({"key": key, "answer": answer}), file=out, flush=True)
    os._exit(0)  # a provider that crashes when it is unloaded has answered all the same


def _ask_compiler(
    provider: Provider,
    device: Device,
    sheets: Mapping[str, Sequence[onnx.ModelProto]],
    options: CompileOptions,
    budget_s: float,
) -> dict[str, str]:
    """Ask in a child process; in this one in a frozen program, which cannot start another Python."""
    if getattr(sys, "frozen", False):
        answers, deadline = {}, time.monotonic() + budget_s
        for key, forms in sheets.items():
            if time.monotonic() < deadline and (answer := _answer(provider, device, forms, options)):
                answers[key] = answer
        return answers
    task = {
        "provider": f"{type(provider).__module__}:{type(provider).__qualname__}",
        "device": device.label,
        "precision": options.precision.value,
        "provider_options": dict(options.provider_options),
        "custom_op_libraries": list(options.custom_op_libraries),
    }
    texts = [
        [key, *(base64.b64encode(form.SerializeToString()).decode() for form in forms)] for key, forms in sheets.items()
    ]
    return ask_in_child(provider.ep_name, task, texts, budget_s)


def _answer(provider: Provider, device: Device, sheets: Sequence[onnx.ModelProto], options: CompileOptions) -> str:
    """Return the answer to a node alone, or that to the node between neighbours if alone it is not taken."""
    answer = ""
    for sheet, ask_it in zip(sheets, (_ask_sheet, _ask_inside), strict=False):
        try:
            verdict = ask_it(provider, device, sheet, options)[0]
        except DeviceUnavailableError:
            return ""  # the device, not the node, is at fault
        except RlxError as err:
            verdict = _short_reason(err)
        if verdict == DEVICE:
            return verdict
        answer = answer or verdict
    return answer


def _ask_inside(provider: Provider, device: Device, proto: onnx.ModelProto, options: CompileOptions) -> list[str]:
    """Return the answer to a node between others, with the optimisation that drops nodes which do nothing."""
    options = options.with_(optimization=OptimizationLevel.BASIC)
    request = SessionRequest(device, ExportedModel(proto, (), (), {}, {}), _outside(proto), options)
    with contextlib.closing(provider.open(request)) as session:
        providers = {each.provider for each in session.assignments if not each.name.startswith(_NEIGHBOUR)}
    return [DEVICE if providers <= {provider.ep_name} else HELPED]


def _computes(provider: Provider, device: Device, dtype: DType, options: CompileOptions) -> bool:
    """Return whether a sum of two vectors of an element type runs on the device; opens a session."""
    node = onnx.NodeProto(op_type="Add", name="sum")
    vector = TensorType(dtype, Shape((2,)))
    question = Question("", node, (vector, vector), (vector,))
    model = onnx.ModelProto(ir_version=10)
    model.opset_import.add(domain="", version=21)
    try:
        return _ask_sheet(provider, device, _sheet([question], model), options, run=True) == [DEVICE]
    except RlxError:
        return False


def _split(group: list[Question], text: str) -> list[list[Question]]:
    """Return the next questions after a refusal: the node that it names alone, else parts of whole operators."""
    named = {int(number) for number in _NUMBERED.findall(text)}
    if len(named) == 1 and (at := named.pop()) < len(group):
        return [[*group[:at], *group[at + 1 :]], [group[at]]]
    operators: dict[tuple[str, str], list[Question]] = {}
    for question in group:
        operators.setdefault((question.node.domain, question.node.op_type), []).append(question)
    units = list(operators.values()) if len(operators) > 1 else [[question] for question in group]
    step = -(-len(units) // _PARTS)
    return [[each for unit in units[at : at + step] for each in unit] for at in range(0, len(units), step)]


def _short_reason(err: RlxError) -> str:
    """Return why a session was refused, in at most 300 characters."""
    text = " ".join(_NUMBERED.sub("node", str(err)).split())
    return text if len(text) <= _REASON_CHARACTERS else f"{text[:_REASON_CHARACTERS]}..."


def _sheet(questions: Sequence[Question], model: onnx.ModelProto, *, all_constant: bool = False) -> onnx.ModelProto:
    """Return a model of these nodes, which share no inputs.

    Large constants are inputs, as kernels ask for their type only, unless `all_constant`, which compilers want.
    """
    sheet = onnx.ModelProto(ir_version=model.ir_version, producer_name="rlx_ort")
    sheet.opset_import.extend(model.opset_import)
    sheet.functions.extend(model.functions)
    sheet.graph.name = "questions"
    for at, question in enumerate(questions):
        node = sheet.graph.node.add()
        node.CopyFrom(question.node)
        node.name = f"q{at}"
        del node.input[:], node.output[:]
        for place, kind in enumerate(question.inputs):
            name = f"q{at}_in{place}" if kind is not None else ""
            node.input.append(name)
            if kind is None:
                continue
            fixed = all_constant and place in question.constants
            if (data := question.constants.get(place)) is not None:
                sheet.graph.initializer.append(tensor_proto(data, name))
            elif fixed and isinstance(kind, TensorType) and kind.shape is not None and kind.shape.is_static:
                dims = kind.shape.static()
                tensor = sheet.graph.initializer.add(name=name, data_type=elem_type(kind.dtype), dims=dims)
                refer(tensor, name, 0, _ones(tensor).nbytes)
            else:
                sheet.graph.input.add(name=name, type=type_proto(kind))
        for place, kind in enumerate(question.outputs):
            node.output.append(f"q{at}_out{place}" if kind is not None else "")
            if kind is not None:
                known = None if isinstance(kind, UnknownType) else type_proto(kind)
                sheet.graph.output.add(name=node.output[-1], type=known)
        for name, kind in question.outer.items():
            sheet.graph.input.add(name=name, type=type_proto(kind))
    return sheet


def _sheets(question: Question, model: onnx.ModelProto) -> list[onnx.ModelProto]:
    """Return the sheet of one question, and the one with neighbours if the node has some.

    OpenVINO takes some operators only together with others, and a node that does nothing can only be dropped there.
    """
    alone = _sheet([question], model, all_constant=True)
    inside = onnx.ModelProto.FromString(alone.SerializeToString())
    node, before, after = alone.graph.node[0], [], []
    for place in question.computed:
        kind = question.inputs[place]
        if isinstance(kind, TensorType):
            name = node.input[place]
            value = next(value for value in inside.graph.input if value.name == name)
            value.name = f"{name}_before"
            before.append(_neighbour(value.name, name, kind))
    kind = question.outputs[0] if question.used else None
    if isinstance(kind, TensorType):
        value = inside.graph.output[0]
        after.append(_neighbour(value.name, f"{value.name}_after", kind))
        value.name += "_after"
    del inside.graph.node[:]
    inside.graph.node.extend([*before, node, *after])
    return [alone, inside] if before or after else [alone]


def _neighbour(name: str, result: str, kind: TensorType) -> onnx.NodeProto:
    """Return a node that every provider takes and none can drop."""
    op_type = "And" if kind.dtype is DType.BOOL else "Add"
    return onnx.NodeProto(op_type=op_type, name=f"{_NEIGHBOUR}{result}", input=[name, name], output=[result])


def _outside(model: onnx.ModelProto) -> dict[str, TensorData]:
    """Return data for the constants of a sheet whose data is not known."""
    tensors = model.graph.initializer
    return {tensor.name: _ones(tensor) for tensor in tensors if tensor.data_location == onnx.TensorProto.EXTERNAL}


def _ones(tensor: onnx.TensorProto) -> TensorData:
    """Return ones for a constant whose data is unknown, since a provider may divide by it."""
    dtype = dtype_of(tensor.data_type)
    return TensorData.from_array(np.ones(tuple(tensor.dims), dtype.numpy), dtype)


class Answers:
    """The answers of one provider, by the key of the question; a file that cannot be used costs asking again."""

    def __init__(self, path: Path, scope: str) -> None:
        self._path = path
        self._scope = scope
        self._known = self._read()
        self._lock = threading.Lock()

    def known(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the answers that are known to these questions."""
        with self._lock:
            return {key: self._known[key] for key in keys if key in self._known}

    def keep(self, answers: Mapping[str, str]) -> None:
        """Remember answers, on disk too."""
        with self._lock, kept.locked(self._path, _LOCK_TIMEOUT_S):
            self._known = {**self._read(), **self._known, **answers}
            kept.write(self._path, _SCHEMA, {"scope": self._scope, "answers": self._known})

    def _read(self) -> dict[str, str]:
        def answers_of(document: Mapping[str, Any]) -> dict[str, str]:
            same = document["scope"] == self._scope
            return {str(key): str(answer) for key, answer in document["answers"].items()} if same else {}

        return kept.read(self._path, _SCHEMA, answers_of) or {}


def answers_of(scope: str) -> Answers:
    """Return the answers for a scope: provider, versions, hardware and the options that matter, as one text."""
    name = hashlib.sha256(scope.encode()).hexdigest()[:24]
    return _answers_in(cache_root() / "capability" / f"{name}.json", scope)


_answers_in = functools.cache(Answers)
