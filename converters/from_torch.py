"""PyTorch modules and exported programs as graphs or bundles, through PyTorch's own ONNX exporter."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlx_ort.converters.bundle import ModelBundle, graph_from_bundle
from rlx_ort.converters.onnx_ir_bridge import bundle_from_ir, foreign_errors, optional_module
from rlx_ort.errors import ConversionError

if TYPE_CHECKING:
    import torch

    from rlx_ort.ir.graph import Graph

_log = logging.getLogger(__name__)


def from_torch(
    module: torch.nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Any = None,
    opset: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    optimize: bool = True,
) -> Graph:
    """Return a PyTorch module as a graph; the weights are those of the module, in its memory, not copies.

    Needs the extra `torch`. Runs `torch.export` on the module and PyTorch's ONNX exporter on the result, which takes
    seconds for a small model and minutes for a large one. Put the module into `eval()` first: one in training mode is
    exported with its dropout and batch statistics, and with a `UserWarning`. Where the exporter transposes or folds a
    weight, that one is a copy.

    Args:
        module: a module, or a program that `torch.export.export` made.
        args: example inputs, positional.
        kwargs: example inputs by name.
        dynamic: which dims have no fixed size, as `torch.export.export` takes it: `{"x": {0: "batch"}}`.
        opset: the ai.onnx opset; None leaves it to PyTorch.
        input_names: names of the model's inputs; None takes those of the module's arguments.
        output_names: names of its outputs.
        optimize: whether the exporter folds constants and fuses. Weights it folds into others lose their names and are
            copies; without it each has its name in `state_dict`.

    Raises:
        ConversionError: torch or onnxscript is not installed, or PyTorch cannot export the module.
    """
    names = {"input_names": input_names, "output_names": output_names}
    bundle = bundle_from_torch(module, args, kwargs, dynamic=dynamic, opset=opset, optimize=optimize, **names)
    return graph_from_bundle(bundle)


def bundle_from_torch(
    module: torch.nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Any = None,
    opset: int | None = None,
    **options: Any,
) -> ModelBundle:
    """Return a PyTorch module as a bundle; see `rlx_ort.from_torch` for the arguments, its cost and its errors."""
    torch = optional_module("torch", "torch", "exporting a PyTorch module")
    if not isinstance(module, (torch.nn.Module, torch.export.ExportedProgram)):
        raise ConversionError(f"a torch.nn.Module or an ExportedProgram is needed, got a {type(module).__name__}")
    if isinstance(module, torch.nn.Module) and any(part.training for part in module.modules()):
        text = "is in training mode, so the graph drops values at random and uses the statistics of each batch"
        warnings.warn(f"{type(module).__name__} {text}; call module.eval() before", UserWarning, stacklevel=3)
    return export_program(
        module,
        f"{type(module).__module__}.{type(module).__qualname__}",
        opset,
        args=tuple(args) if isinstance(args, (tuple, list)) else (args,),
        kwargs=dict(kwargs or {}),
        dynamic_shapes=dynamic,
        **options,
    )


def export_program(
    program: torch.nn.Module | torch.export.ExportedProgram, origin: str, opset: int | None, **options: Any
) -> ModelBundle:
    """Return the result of `torch.onnx.export` for a module or program as a bundle; `options` are its own."""
    torch = optional_module("torch", "torch", "exporting a PyTorch program")
    optional_module("onnxscript", "torch", "PyTorch's ONNX exporter")
    hint = "; torch.export.export(...) alone shows whether the module itself cannot be traced"
    with quiet(), foreign_errors(f"PyTorch cannot export {origin} to ONNX", hint):
        made = torch.onnx.export(program, dynamo=True, verbose=False, opset_version=opset, **options)
    return bundle_from_ir(made.model, origin)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep PyTorch's own messages off standard error; its warnings go to our log."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
    for warning in caught:
        _log.debug("%s: %s", warning.category.__name__, warning.message)
