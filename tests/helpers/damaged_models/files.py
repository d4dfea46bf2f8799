"""ONNX files damaged in ten ways; the same kind and number give the same bytes.

`fields` changes whatever a file has: names, counts, dims, types, versions, attributes. The other kinds are those that a
change of a field seldom makes.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]  # protobuf ships no types
from onnx import AttributeProto, TensorProto, helper, parser

__all__ = ["KINDS", "NUMBERS", "REALS", "damaged_file", "retyped"]

_HEAD = 'ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]'
_TEXTS = (
    """<HEAD> mlp (float[2, 4] x) => (float[2, 3] y)
    <float[4, 3] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0}, float[3] b = {0.5, -0.5, 1.0}>
    { m = MatMul (x, w) s = Add (m, b) r = Relu (s) t = LeakyRelu <alpha = 0.1> (r) y = Softmax <axis = -1> (t) }""",
    """<HEAD> convnet (float[1, 2, 5, 5] x) => (float[1, 2, 2, 2] y)
    <float[2, 2, 2, 2] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}>
    { c = Conv <kernel_shape = [2, 2], pads = [0, 0, 0, 0], strides = [1, 1], dilations = [1, 1], group = 1> (x, w)
      n = MeanVarianceNormalization <axes = [0, 2, 3]> (c)
      y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (n) }""",
    """<HEAD> shapes (float[n, 4] x, int64[1] d) => (float[a, b] y, int64[r] z)
    <int64[2] s = {2, -1}, int64[1] one = {1}, int64[1] two = {2}, float[2] v = {0.0, 1.0},
     int64 i = {1}, int64 j = {5}>
    { q = Reshape <allowzero = 0> (x, s) p = Transpose <perm = [1, 0]> (q) k = Slice (p, one, two)
      o = OneHot <axis = -1> (one, d, v) h = Concat <axis = 0> (one, two, s) g = Shape (k) y = Expand (k, g)
      e = Gather <axis = 0> (h, one) t = Tile (e, two) u = Range (i, j, i) z = Concat <axis = 0> (t, u) }""",
    """<HEAD> branches (bool c, float[2] x) => (float[2] y)
    <float[2] w = {3.0, 4.0}> {
      y = If (c) <
        then_branch = yes () => (float[2] a) { a = Add (x, w) },
        else_branch = no () => (float[2] b) <float[2] u = {1.0, 2.0}> { t = Mul (x, u) b = Neg (t) }> }""",
    """<HEAD> loops (int64 n, bool c, float[2] x) => (float[2] y, float[m, 2] all)
    { y, all = Loop (n, c, x) <
        body = step (int64 i, bool go, float[2] v) => (bool more, float[2] out, float[2] scan) {
          more = Identity (go) out = Add (v, v) scan = Mul (v, x) }> }""",
    """<HEAD> scans (float[2] s, float[3, 2] x) => (float[2] f, float[3, 2] y)
    { f, y = Scan <num_scan_inputs = 1, body = step (float[2] a, float[2] b) => (float[2] c, float[2] d) {
          c = Add (a, b) d = Identity (c) }> (s, x) }""",
    """<HEAD> texts (string[2] x) => (string[n] y, bool[2] z, string[2] k)
    { y = StringNormalizer <case_change_action = "NONE", is_case_sensitive = 1, stopwords = ["text 1"]> (x)
      w = Constant <value_strings = ["a", "b"]> () z = Equal (x, x) k = StringConcat (w, t) }""",
    """<ir_version: 10, opset_import: ["" : 21, "f" : 1]> calls (float[2] x) => (float[2] y)
    { a = f.twice <k = 3> (x) y = f.twice (a) }
    <domain: "f", opset_import: ["" : 21, "f" : 1]> twice <k: int = 2> (p) => (q)
    { c = Constant <value_int: int = @k> () d = CastLike (c, p) t = f.inner (p) q = Mul (t, d) }
    <domain: "f", opset_import: ["" : 21]> inner (u) => (v) { v = Neg (u) }""",
    """<HEAD> packed (float[4] x) => (float[4] y, float[2, 2] e)
    <float s = {0.5}> { d = DequantizeLinear (q, s) y = Add (x, d) e = DequantizeLinear <axis = 0> (h, s, z) }""",
    """<HEAD> sequences (float[4] x) => (float[2] y, float[k] j)
    <int64 i = {1}, int64[2] n = {2, 2}> { s = SplitToSequence <axis = 0> (x, n) y = SequenceAt (s, i)
      t = SequenceInsert (s, y, i) j = ConcatFromSequence <axis = 0> (t) }""",
    """<HEAD> blocks (float[2, 16] x) => (float[2, 19] y, float[5, 61] o, int4[5] q, int8[5, 61] c)
    { d = DequantizeLinear <axis = 0, block_size = 4> (w, s, z) y = MatMul (x, d) o = DequantizeLinear <axis = 0> (h, t)
      q = QuantizeLinear <axis = 0> (t, r, n) c = Cast <to = 3> (h) }""",
    """<ir_version: 7, opset_import: ["" : 10]> older (float[2, 3] x) => (float[2, 1] y)
    { c = Clip <min = 0.0, max = 6.0> (x) s = ReduceSum <axes = [1], keepdims = 1> (c)
      q = Squeeze <axes = [1]> (s) u = Unsqueeze <axes = [1]> (q) d = Dropout <ratio = 0.5> (u) y = Softmax (d) }""",
)
_NAMES = ("", "x", "y", "a", "\0", "/", "..", "x" * 300, "é", "w", "f", "Add", "If", "@k", "ghost")
NUMBERS = (
    0, 1, -1, 2, 3, 7, 255, -128, 2**31 - 1, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1
)  # fmt: skip
REALS = (0.0, -0.0, 1e-45, 3.4e38, -1.5, float("nan"), float("inf"), -float("inf"))
_TYPES = {
    "INT": ("i", 3), "FLOAT": ("f", 2.5), "STRING": ("s", b"VALID"), "INTS": ("ints", [1, 2]),
    "FLOATS": ("floats", [1.5]), "STRINGS": ("strings", [b"a", b"\xff"]),
}  # fmt: skip


@functools.cache
def _bases() -> tuple[onnx.ModelProto, ...]:
    models = [parser.parse_model(text.replace("HEAD", _HEAD)) for text in _TEXTS]
    texts, packed = models[6].graph, models[8].graph
    texts.initializer.append(_texts("t"))
    packed.initializer.append(helper.make_tensor("q", TensorProto.INT4, [4], [1, -2, 3, -4]))
    raw = TensorProto(name="h", data_type=TensorProto.UINT4, dims=[2, 2], raw_data=b"\x21\x43")
    zero = TensorProto(name="z", data_type=TensorProto.UINT4, dims=[], raw_data=b"\x01")
    packed.initializer.extend([raw, zero])
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("g", TensorProto.FLOAT, [2], [1.0, 2.0]),
        helper.make_tensor("gi", TensorProto.INT64, [2], [0, 3]),
        [4],
    )
    values = [(7 * place) % 16 - 8 for place in range(5 * 61)]
    larger = models[10].graph
    larger.initializer.extend(
        [
            helper.make_tensor("w", TensorProto.INT4, [16, 19], values[: 16 * 19]),
            helper.make_tensor("s", TensorProto.FLOAT, [4, 19], [0.25 * (place % 5 + 1) for place in range(4 * 19)]),
            helper.make_tensor("z", TensorProto.INT4, [4, 19], [place % 7 - 3 for place in range(4 * 19)]),
            onnx.numpy_helper.from_array(np.array(values).astype(ml_dtypes.int4).reshape(5, 61), "h"),
            helper.make_tensor("t", TensorProto.FLOAT, [5], [1.0, 0.5, 2.0, 3.0, 0.1]),
            helper.make_tensor("r", TensorProto.FLOAT, [5], [1.0, 0.5, 0.5, 1.0, 0.1]),
            TensorProto(name="n", data_type=TensorProto.INT4, dims=[5], raw_data=b"\x10\x32\x04"),
        ]
    )
    other = onnx.ModelProto()
    other.CopyFrom(models[9])
    other.graph.sparse_initializer.append(sparse)
    other.graph.node.insert(0, helper.make_node("Add", ["x", "g"], ["xg"]))
    other.graph.node[1].input[0] = "xg"
    return (*models, other)


def damaged_file(kind: str, number: int) -> bytes:
    """Return the model file of a kind (see `KINDS`) and number."""
    rng = random.Random(f"{kind} {number}")
    model = onnx.ModelProto()
    preferred = _PREFERRED.get(kind)
    bases = _bases()
    model.CopyFrom(bases[rng.choice(preferred) if preferred and rng.random() < 0.8 else number % len(bases)])
    made = KINDS[kind](model, rng)
    if isinstance(made, bytes):
        return made
    if rng.random() < 0.15:  # two faults at once
        again = KINDS["fields"](model, rng)
        if isinstance(again, bytes):
            return again
    data: bytes = model.SerializeToString()
    return data


def _attributes(model: onnx.ModelProto) -> list[AttributeProto]:
    return [attribute for node in _nodes(model) for attribute in node.attribute]


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    found = [node for graph in _graphs(model.graph) for node in graph.node]
    return found + [node for function in model.functions for node in function.node]


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _tensors(model: onnx.ModelProto) -> list[TensorProto]:
    found = [tensor for graph in _graphs(model.graph) for tensor in graph.initializer]
    found += [attribute.t for attribute in _attributes(model) if attribute.HasField("t")]
    for sparse in model.graph.sparse_initializer:
        found += [sparse.values, sparse.indices]
    return found


def _shapes(model: onnx.ModelProto) -> list[Any]:
    infos = [info for graph in _graphs(model.graph) for info in (*graph.input, *graph.output)]
    return [dim for info in infos for dim in info.type.tensor_type.shape.dim]


def retyped(attribute: AttributeProto, rng: random.Random) -> None:
    """Give an attribute another type and a value of it, in place."""
    name, kind = attribute.name, rng.choice([*_TYPES, "TENSOR", "GRAPH", "SPARSE_TENSOR", "TYPE_PROTO", "UNDEFINED"])
    attribute.Clear()
    attribute.name = name
    attribute.type = AttributeProto.AttributeType.Value(kind)
    if kind in _TYPES:
        field, value = _TYPES[kind]
        (getattr(attribute, field).extend if isinstance(value, list) else functools.partial(setattr, attribute, field))(
            value
        )
    elif kind == "TENSOR":
        attribute.t.CopyFrom(helper.make_tensor("", TensorProto.FLOAT, [1], [1.0]))
    elif kind == "GRAPH":
        attribute.g.name = "stray"
    elif kind == "TYPE_PROTO":
        attribute.tp.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, [1]))


def _attribute_type(model: onnx.ModelProto, rng: random.Random) -> None:
    attributes = _attributes(model)
    if not attributes or rng.random() < 0.1:
        node = rng.choice(_nodes(model))
        attributes = [node.attribute.add(name=rng.choice(["axis", "to", "body", "value", "perm", "alpha"]))]
    attribute = rng.choice(attributes)
    if rng.random() < 0.2:
        attribute.type = rng.choice([*AttributeProto.AttributeType.values()])
    else:
        retyped(attribute, rng)


_HOLE = "Qq@Hole@qQ"


def _not_utf8(model: onnx.ModelProto, rng: random.Random) -> bytes:
    """Return the file with one of its texts replaced by bytes that are no UTF-8 text."""
    places = [
        place for place in _places(model) if place[1].type == place[1].TYPE_STRING and place[1].name != "doc_string"
    ]
    message, field, index = rng.choice(places)
    if index is None:
        setattr(message, field.name, _HOLE)
    else:
        getattr(message, field.name)[index] = _HOLE
    bad = rng.choice([b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88"])
    data: bytes = model.SerializeToString()
    return data.replace(_HOLE.encode(), bad + b"x" * (len(_HOLE) - len(bad)))


def _wide_sizes(model: onnx.ModelProto, rng: random.Random) -> bytes:
    """Return the file with a size written as a number of up to 70 bits, which protobuf cuts or refuses."""
    tensors = _tensors(model)
    mark = 0x1234567891234567
    if tensors and rng.random() < 0.6:
        rng.choice(tensors).dims.append(mark)
    elif _shapes(model):
        rng.choice(_shapes(model)).dim_value = mark
    else:
        model.graph.node[0].attribute.add(name="axis", type=AttributeProto.INT, i=mark)
    data: bytes = model.SerializeToString()
    written = TensorProto(dims=[mark]).SerializeToString()[2:]  # without the key and the length of the packed list
    written = written if written in data else onnx.TensorShapeProto.Dimension(dim_value=mark).SerializeToString()[1:]
    size = len(written)
    wide = rng.choice([b"\xff" * size, b"\xff" * (size - 1) + b"\x7f", b"\x80" * (size - 1) + b"\x01"])
    if rng.random() < 0.5:
        wide = b"\x80" * (size - 1) + bytes([rng.randrange(128)])
    return data.replace(written, wide)


def _texts(name: str) -> TensorProto:
    return TensorProto(name=name, data_type=TensorProto.STRING, dims=[2], string_data=[b"one", b"two"])


def _truncated(model: onnx.ModelProto, rng: random.Random) -> bytes:
    data: bytes = model.SerializeToString()
    if rng.random() < 0.5:
        return data[: rng.randrange(len(data))]
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.choice([1, 2, 4, 8, 40]) :]


def _four_bits(model: onnx.ModelProto, rng: random.Random) -> None:
    tensors = [tensor for tensor in _tensors(model) if tensor.data_type in (21, 22)] or _tensors(model)
    if not tensors:
        return
    tensor = rng.choice(tensors)
    match rng.randrange(8):
        case 0:
            tensor.data_type = rng.choice([21, 22, 23, 24, 25, 26, 17, 3, 2])
        case 1:
            size = len(tensor.raw_data) or -(-math.prod(tensor.dims) // 2)
            tensor.ClearField("int32_data")
            tensor.raw_data = rng.randbytes(max(size + rng.choice([0, 0, 0, -1, 1, size]), 0))
        case 2:
            tensor.ClearField("raw_data")
            tensor.int32_data[:] = [rng.choice([0, 1, -1, 15, 16, 255, 256, 2**31 - 1, -(2**31)]) for _ in range(2)]
        case 3:
            tensor.dims[:] = rng.choice([[3], [5], [0], [1], [4, 1], [2, 3]])
        case 4:
            size = -(-math.prod(tensor.dims) // rng.choice([2, 2, 2, 1, 4]))
            tensor.ClearField("raw_data")
            tensor.int32_data[:] = [rng.randrange(-300, 300) for _ in range(max(size + rng.choice([0, 0, -1, 1]), 0))]
        case 5:
            tensor.ClearField("raw_data")
            tensor.int64_data[:] = [1, 2, 3, 4]
        case 6:
            tensor.dims[:] = [3]
            tensor.ClearField("int32_data")
            tensor.raw_data = bytes([rng.randrange(256), rng.randrange(256)])
        case _:
            for node in model.graph.node:
                if node.op_type == "DequantizeLinear" and len(node.input) < 3:
                    node.input.append("h")


def _bodies(model: onnx.ModelProto, rng: random.Random) -> None:
    holders = [a for a in _attributes(model) if a.HasField("g")]
    if not holders:
        node = rng.choice(model.graph.node)
        holders = [node.attribute.add(name="body", type=AttributeProto.GRAPH)]
        holders[0].g.CopyFrom(_bases()[4].graph.node[0].attribute[0].g)
    body = rng.choice(holders).g
    match rng.randrange(9):
        case 0 if body.input:
            del body.input[rng.randrange(len(body.input))]
        case 1 if body.output:
            del body.output[rng.randrange(len(body.output))]
        case 2:
            body.output.add().CopyFrom(rng.choice([*body.output, *body.input, onnx.ValueInfoProto(name="ghost")]))
        case 3 if body.node:
            del body.node[rng.randrange(len(body.node))]
        case 4 if body.node:
            node = rng.choice(body.node)
            node.output[0] = rng.choice(["x", "w", "y"])  # shadows a name of the graph around it
        case 5 if body.node:
            rng.choice(body.node).input[0] = rng.choice(["ghost", "y", "x"])
        case 6 if body.input or body.output:
            info = rng.choice([*body.input, *body.output])
            info.type.tensor_type.elem_type = rng.choice([0, 1, 7, 9, 99])
        case 7:
            inner = onnx.GraphProto.FromString(body.SerializeToString())
            body.node.add(op_type="If", input=["c"], output=["deep"]).attribute.add(
                name="then_branch", type=AttributeProto.GRAPH
            ).g.CopyFrom(inner)
        case _:
            body.Clear()


def _external(model: onnx.ModelProto, rng: random.Random) -> None:
    tensors = _tensors(model)
    if not tensors:
        return
    tensor = rng.choice(tensors)
    tensor.data_location = TensorProto.EXTERNAL
    places = ["", "/dev/zero", "../x", "ghost.bin", "model.onnx", "a\0b", "C:\\x", "x" * 5000, ".", "w*"]
    sizes = ["0", "-1", "16", str(2**63), str(2**64), "9" * 40, "x", "", "٣"]
    for key, values in (("location", places), ("offset", sizes), ("length", sizes), ("checksum", sizes)):
        if rng.random() < 0.7:
            tensor.external_data.add(key=key, value=rng.choice(values))


def _functions(model: onnx.ModelProto, rng: random.Random) -> None:
    if not model.functions:
        model.functions.extend(_bases()[7].functions)
        model.opset_import.add(domain="f", version=1)
    function = rng.choice(model.functions)
    match rng.randrange(8):
        case 0:
            function.domain, function.name = "", rng.choice(["Add", "Relu", "If", "Softmax"])
        case 1:
            function.input[0] = rng.choice(_NAMES)
        case 2:
            function.output.append(rng.choice(_NAMES))
        case 3:
            del function.opset_import[:]
        case 4:
            function.node.add(op_type=function.name, domain=function.domain, input=["p"], output=["r"])
        case 5:
            function.attribute.append(rng.choice(["k", "", "z"]))
        case 6:
            rng.choice(function.node).op_type = rng.choice(["inner", "twice", "If", "Ghost", ""])
        case _:
            function.overload = "o"


def _bits(model: onnx.ModelProto, rng: random.Random) -> bytes:
    data = bytearray(model.SerializeToString())
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice([0, 0x7F, 0x80, 0xFF])
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                end = min(at + rng.randrange(1, 30), len(data))
                data[at:at] = data[at:end]
    return bytes(data)


def _places(message: Message) -> list[tuple[Any, Any, int | None]]:
    """Return every set field of a message, messages below it included: (message, field, index or None)."""
    found: list[tuple[Any, Any, int | None]] = []
    for field, value in message.ListFields():
        many = field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
        items = [*value] if many else [value]
        for index, item in enumerate(items):
            found.append((message, field, index if many else None))
            if isinstance(item, Message):
                found += _places(item)
    return found


def _fields(model: onnx.ModelProto, rng: random.Random) -> None:
    """Change, drop or repeat any field of any message."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = _places(model)
        if not places:
            return
        message, field, index = rng.choice(places)
        if rng.random() < 0.2:
            if index is None:
                message.ClearField(field.name)
            else:
                del getattr(message, field.name)[index]
            continue
        if field.type == field.TYPE_MESSAGE:
            same = [other for other in places if other[1].message_type is field.message_type]
            chosen, at, place = rng.choice(same)
            source = getattr(chosen, at.name) if place is None else getattr(chosen, at.name)[place]
            copy = type(source).FromString(source.SerializeToString())
            into = getattr(message, field.name) if index is None else getattr(message, field.name)[index]
            if rng.random() < 0.5 or index is None:
                into.CopyFrom(copy)
            else:
                getattr(message, field.name).add().CopyFrom(copy)
            continue
        value: Any = rng.choice(NUMBERS)
        if field.type == field.TYPE_STRING:
            names = [getattr(m, f.name) if i is None else getattr(m, f.name)[i] for m, f, i in places if f.type == 9]
            value = rng.choice([*_NAMES, *names])
        elif field.type == field.TYPE_BYTES:
            value = rng.randbytes(rng.choice([0, 1, 4, 16]))
        elif field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
            value = rng.choice(REALS)
        elif field.type == field.TYPE_ENUM:
            value = rng.randrange(0, 16)
        elif field.type == field.TYPE_INT32:
            value = rng.choice([0, 1, -1, 7, 22, 255, 2**31 - 1, -(2**31)])
        elif field.type == field.TYPE_UINT64:
            value = rng.choice([0, 1, 2**64 - 1])
        try:
            if index is None:
                setattr(message, field.name, value)
            else:
                getattr(message, field.name)[index] = value
        except (ValueError, TypeError, DecodeError):
            continue  # an enum without such a member


KINDS: dict[str, Callable[[onnx.ModelProto, random.Random], bytes | None]] = {
    "attribute type": _attribute_type,
    "names not UTF-8": _not_utf8,
    "sizes beyond 64 bits": _wide_sizes,
    "truncated": _truncated,
    "4-bit data": _four_bits,
    "bodies": _bodies,
    "external data": _external,
    "functions": _functions,
    "bits": _bits,
    "fields": _fields,
}
"""Kind of damage -> what does it: it changes the model, or returns the bytes of the file."""
_PREFERRED = {"4-bit data": (8, 10, 10), "bodies": (3, 4, 5), "functions": (7,)}
