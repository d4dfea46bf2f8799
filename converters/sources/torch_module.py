"""PyTorch modules and exported programs as bundles, through PyTorch's own ONNX exporter."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlx_ort.converters.bundle import ModelBundle
from rlx_ort.converters.extras import optional_module
from rlx_ort.converters.onnx_ir_bridge import bundle_from_ir
from rlx_ort.errors import ConversionError

if TYPE_CHECKING:
    import torch

__all__ = ["export_program", "from_torch", "quiet"]

_log = logging.getLogger(__name__)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MAX_CAUSES = 3


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
) -> ModelBundle:
    """Return a PyTorch module as a bundle; the weights are those of the module, in its memory, not copies.

    Runs `torch.export` on the module and PyTorch's ONNX exporter on the result, which takes seconds for a small model
    and minutes for a large one. Put the module into `eval()` first, unless dropout is wanted in the model. Where the
    exporter transposes or folds a weight, that one is a copy.

    Args:
        module: a module, or a program that `torch.export.export` made.
        args: example inputs, positional.
        kwargs: example inputs by name.
        dynamic: which dims have no fixed size, as `torch.export.export` takes it: `{"x": {0: "batch"}}`.
        opset: the ai.onnx opset; None leaves it to PyTorch.
        input_names: names of the model's inputs; None takes those of the module's arguments.
        output_names: names of its outputs.
        optimize: whether the exporter folds constants and fuses. Weights it folds into others lose their names and are
            copies; without it each is what `state_dict` calls it.

    Raises:
        ConversionError: torch or onnxscript is not installed, or PyTorch cannot export the module.
    """
    torch = optional_module("torch", "torch", "exporting a PyTorch module")
    if not isinstance(module, (torch.nn.Module, torch.export.ExportedProgram)):
        raise ConversionError(f"a torch.nn.Module or an ExportedProgram is needed, got a {type(module).__name__}")
    return _exported(
        module,
        f"{type(module).__module__}.{type(module).__qualname__}",
        args=tuple(args) if isinstance(args, (tuple, list)) else (args,),
        kwargs=dict(kwargs or {}),
        dynamic_shapes=dynamic,
        opset_version=opset,
        input_names=input_names,
        output_names=output_names,
        optimize=optimize,
    )


def export_program(program: torch.export.ExportedProgram, origin: str, opset: int | None) -> ModelBundle:
    """Return an exported program as a bundle.

    Raises:
        ConversionError: onnxscript is not installed, or PyTorch cannot export the program.
    """
    return _exported(program, origin, opset_version=opset)


def _exported(module: Any, origin: str, **options: Any) -> ModelBundle:
    torch = optional_module("torch", "torch", "exporting a PyTorch program")
    optional_module("onnxscript", "torch", "PyTorch's ONNX exporter")
    with quiet(), _as_conversion_error(origin):
        program = torch.onnx.export(module, dynamo=True, verbose=False, **options)
    return bundle_from_ir(program.model, origin)


@contextlib.contextmanager
def _as_conversion_error(origin: str) -> Iterator[None]:
    try:
        yield
    except ConversionError:
        raise
    except Exception as err:  # the exporter and what it calls raise errors of many kinds
        raise ConversionError(
            f"PyTorch cannot export {origin} to ONNX: {_causes(err)}; torch.export.export(...) alone shows whether the "
            "module itself is what cannot be traced"
        ) from err


def _causes(err: BaseException) -> str:
    """Return the first lines of an error and of what caused it; PyTorch's have pages, and colours for a terminal."""
    causes: list[str] = []
    link: BaseException | None = err
    while link is not None and len(causes) < _MAX_CAUSES:
        lines = [line.strip() for line in _COLOURS.sub("", str(link)).splitlines()]
        causes.append(f"{type(link).__name__}: {next(filter(None, lines), '')}")
        link = link.__cause__
    return "; caused by ".join(causes)


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
