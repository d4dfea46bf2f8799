"""PyTorch -> `Graph`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rlx_ort.ir.graph import Graph

__all__ = ["from_torch"]


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
    """Return a PyTorch module as a graph; its weights are those of the module, in its memory, not copies.

    Needs the extra `torch`. See `rlx_ort.converters.sources.from_torch`, which gives a bundle, for the arguments and
    what it costs.

    Raises:
        ConversionError: torch or onnxscript is not installed, or PyTorch cannot export the module.
    """
    from rlx_ort.converters.bundle import graph_from_bundle
    from rlx_ort.converters.sources.torch_module import from_torch as bundle_from_torch

    return graph_from_bundle(
        bundle_from_torch(
            module,
            args,
            kwargs,
            dynamic=dynamic,
            opset=opset,
            input_names=input_names,
            output_names=output_names,
            optimize=optimize,
        )
    )
