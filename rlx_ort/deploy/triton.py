"""Export to a model repository of NVIDIA Triton, whose ONNX Runtime backend serves it.

    DIR/NAME/config.pbtxt         the model's interface and how requests are batched
    DIR/NAME/1/model.onnx         version 1, in normal form
    DIR/NAME/1/model.onnx.data    its weights, once

`config.pbtxt` is the text form of `inference.ModelConfig`
(https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rlx_ort.deploy.names import check_model_name
from rlx_ort.errors import PackageError, WriteError, advice
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType
from rlx_ort.storage import put_in_place

if TYPE_CHECKING:
    from rlx_ort.ir.graph import Graph
    from rlx_ort.ir.types import ValueType
    from rlx_ort.options.compile_options import CompileOptions

INSTANCE_KINDS: Mapping[str, str] = MappingProxyType({"auto": "KIND_AUTO", "cpu": "KIND_CPU", "gpu": "KIND_GPU"})
"""Where Triton may place the instances of a model -> its name for it."""

NO_BATCH_DIM = "inputs and outputs have no open first dim in common; that of several inputs needs one name"
"""Why requests are not put together where `batch_dim` finds no dim."""

_CONFIG = """\
name: {name}
backend: "onnxruntime"
default_model_filename: "model.onnx"
max_batch_size: {rows}
instance_group {{
  count: {instances}
  kind: {kind}
}}
version_policy {{
  specific {{
    versions: 1
  }}
}}
"""
_KINDS = {"u": ("UINT", (8, 16, 32, 64)), "i": ("INT", (8, 16, 32, 64)), "f": ("FP", (16, 32, 64))}
DATATYPES: Mapping[DType, str] = MappingProxyType(
    {DType.BOOL: "BOOL"}
    | {DType(f"{ours}{bits}"): f"{theirs}{bits}" for ours, (theirs, sizes) in _KINDS.items() for bits in sizes}
    | {DType.BF16: "BF16", DType.STRING: "BYTES"}
)
"""Our dtype -> its name in the inference protocol, whose tensors have no other types."""


def configured_type(datatype: str) -> str:
    """Return the name that a model's configuration has for a type of the protocol."""
    # https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/user_guide/model_configuration.html
    return f"TYPE_{'STRING' if datatype == 'BYTES' else datatype}"


def export_triton(
    graph: Graph,
    target: Path,
    name: str,
    *,
    max_batch: int = 8,
    instances: int = 1,
    kind: str = "auto",
    options: CompileOptions | None = None,
    overwrite: bool = False,
    batch_unproven: bool = False,
) -> Path:
    """Write a graph as a model of a Triton repository and return the model's folder, which appears whole or not at all.

    Weights are streamed to one data file. Requests are batched if `batching` finds a dim for it; else a comment in
    `config.pbtxt` has the reason. With `batch_unproven` they are batched without the proof that rows are independent.
    Every parameter of the graph needs data. `target` is the repository, created if need be. `max_batch` limits the rows
    that Triton puts together, 0 for none. `instances` are opened on each processor of `kind`, a key of
    `INSTANCE_KINDS`. `overwrite` replaces a model of that name.

    Raises:
        PackageError: the name cannot be a folder's, the model is there already, or Triton has no such type.
        ConversionError: the model cannot be written.
    """
    import onnx

    from rlx_ort.converters.files import save_onnx, staging

    check_model_name(name)
    folder = target / name
    if folder.exists() and not overwrite:
        raise PackageError(f"{folder} exists and was left as it is; {advice('overwrite=True', '--force')} replaces it")
    config_text(graph, name, max_batch=0)  # types that Triton lacks are refused before anything is written
    try:
        target.mkdir(parents=True, exist_ok=True)
        with staging(folder) as stage:
            old, model = stage.path.with_name(".old"), stage.path / "1" / "model.onnx"
            model.parent.mkdir(parents=True)
            save_onnx(graph, model, external_data=bool(graph.params), options=options)
            # An output whose name an input has got another one in the model.
            names = [value.name for value in onnx.load(model, load_external_data=False).graph.output]
            text = config_text(
                graph,
                name,
                outputs=names,
                max_batch=max_batch,
                instances=instances,
                kind=kind,
                options=options,
                batch_unproven=batch_unproven,
            )
            (stage.path / "config.pbtxt").write_text(text, encoding="utf-8", newline="\n")
            if folder.exists():
                put_in_place(folder, old)
            try:
                put_in_place(stage.path, folder)
            except OSError:
                if old.exists():
                    put_in_place(old, folder)
                raise
    except OSError as err:
        raise WriteError(f"{folder} cannot be written: {err.strerror or err}") from err
    return folder


def config_text(
    graph: Graph,
    name: str,
    *,
    outputs: Sequence[str] | None = None,
    max_batch: int = 8,
    instances: int = 1,
    kind: str = "auto",
    options: CompileOptions | None = None,
    batch_unproven: bool = False,
) -> str:
    """Return the text of `config.pbtxt`; `outputs` are the names in the model where they are not the graph's.

    The first line is a comment with the reason if the model could be batched by `max_batch` but is not.

    Raises:
        PackageError: Triton has no type for an input or output.
    """
    dim, why = batching(graph, options, unproven=batch_unproven) if max_batch else (None, "")
    batched = dim is not None
    named = zip(graph.output_names if outputs is None else outputs, graph.outputs, strict=True)
    tensors = [_tensor("input", value.name, value.type, batched) for value in graph.inputs]
    tensors += [_tensor("output", name, value.type, batched) for name, value in named]
    rows, where = max_batch if batched else 0, INSTANCE_KINDS[kind]
    config = _CONFIG.format(name=_quoted(name), rows=rows, instances=instances, kind=where)
    reason = " ".join(why.split()).encode("ascii", "backslashreplace").decode()
    comment = f"# not batched: {reason}\n" if why else ""
    return "".join([comment, config, *tensors, "dynamic_batching {\n}\n" * batched])


def batching(graph: Graph, options: CompileOptions | None = None, *, unproven: bool = False) -> tuple[str | None, str]:
    """Return the named dim along which requests may be put together, or None and the reason.

    It is that of `batch_dim`, if rows along it are proved independent, or else with `unproven`.
    """
    from rlx_ort.converters.row_independence import row_independence

    dim = batch_dim(graph)
    if dim is None:
        return None, NO_BATCH_DIM
    proof = None if unproven else row_independence(graph, dim, options)
    return (dim, "") if proof is None or proof else (None, f"rows are not proved independent: {proof}")


def batch_dim(graph: Graph) -> str | None:
    """Return the open dim that every input begins with, or None if there is none, or an output has a fixed first dim.

    `UNNAMED` stands for a dim without a name, which a graph of one input may have: several inputs need not have equal
    sizes there. Exporters give the first dim of an output another name than that of the inputs, or 1; whether its size
    is the same follows from the row proof.
    """
    from rlx_ort.converters.row_independence import UNNAMED

    if any(not isinstance(value.type, TensorType) or not value.type.shape for value in (*graph.inputs, *graph.outputs)):
        return None
    first = {_first_dim(value.type) for value in graph.inputs}
    common = first.pop() if len(first) == 1 else 0
    fixed = {dim for value in graph.outputs if isinstance(dim := _first_dim(value.type), int)}
    if isinstance(common, int) or fixed - {1}:
        return None
    return common if common is not None else UNNAMED if len(graph.inputs) == 1 else None


def _first_dim(kind: ValueType) -> int | str | None:
    shape = kind.shape if isinstance(kind, TensorType) else None
    return shape[0] if shape else None


def _tensor(side: str, name: str, kind: ValueType, batched: bool) -> str:
    if not isinstance(kind, TensorType) or kind.shape is None or kind.dtype not in DATATYPES:
        raise PackageError(f"Triton has no type for {name!r}, which is {kind}; cast it, or make it a tensor")
    dims = [dim if isinstance(dim, int) else -1 for dim in kind.shape[1 if batched else 0 :]]
    fields = [f"name: {_quoted(name)}", f"data_type: {configured_type(DATATYPES[kind.dtype])}"]
    # Triton has no scalars: one element is reshaped to rank 0.
    fields += [f"dims: {dim}" for dim in dims] or ["dims: 1", "reshape {", "}"]
    return "".join([f"{side} {{\n", *(f"  {field}\n" for field in fields), "}\n"])


def _quoted(text: str) -> str:
    """Return a text as protobuf's text form has it."""
    encoded = text.encode("utf-8")
    return '"' + "".join(chr(b) if 0x20 <= b < 0x7F and b not in b'"\\' else f"\\{b:03o}" for b in encoded) + '"'
