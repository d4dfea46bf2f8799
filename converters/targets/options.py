"""What a target is to be like."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rlx_ort.converters.files import Progress
    from rlx_ort.device import Device
    from rlx_ort.ir.graph import Graph

__all__ = ["EngineSaver", "TargetOptions"]


class EngineSaver(Protocol):
    """Writes what an engine has made of a graph; `rlx_ort.providers.saving.save_optimized` is one."""

    def __call__(
        self, graph: Graph, path: Path, device: Device | str, *, ort_format: bool, external_data: bool, portable: bool
    ) -> None:
        """Write the file, which does not exist yet."""


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """How to write a model.

    Attributes:
        opset: the ai.onnx opset of an ONNX file; None leaves the bundle's.
        ir_version: the IR version of an ONNX file; None leaves the bundle's, or follows the opset.
        external_data: whether weights of an ONNX file go to `<file name>.data`; None decides by their size.
        params: name of a safetensors file beside an ONNX file that gets the weights, and that it refers to; ONNX
            Runtime maps it, and other tools read it. Excludes `external_data`.
        device: the device that `.onnx` is optimised for, and `.ort` made for; None optimises `.onnx` not at all, and
            `.ort` for any CPU.
        overwrite: whether files that are there may be replaced.
        saver: what writes optimised models; converters know no engine, so it is handed in.
        progress: told how many further bytes of weights were written to an ONNX file.
    """

    opset: int | None = None
    ir_version: int | None = None
    external_data: bool | None = None
    params: str | None = None
    device: Device | str | None = None
    overwrite: bool = False
    saver: EngineSaver | None = None
    progress: Progress | None = None
