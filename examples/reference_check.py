"""What the examples share: run a graph on devices and print how far each answer is from a float64 reference."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.graph_devices import GraphDevices
from rlx_ort.ir.graph import Graph

Array: TypeAlias = npt.NDArray[Any]


def relative_error(got: Array, expected: Array) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return float(np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max())


def show(graph: Graph, inputs: Mapping[str, Array], expected: Array) -> None:
    """Run the graph on the devices that the command line names, else on all that take it, and print each error."""
    runner = GraphDevices(graph)
    for device in sys.argv[1:] or [device.label for device in runner.devices()]:
        outputs = runner.run(device, inputs)
        print(f"{graph.name} on {device}: error {relative_error(outputs[0], expected):.1e}")
