"""Norms of groups of channels give what float64 gives: on CUDA as its GroupNorm, elsewhere as they were written."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from norm_nets import Block, Net

import rlx_ort
from rlx_ort import CompileOptions
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.device import Device
from rlx_ort.execution.session import working_provider
from rlx_ort.providers.claims import kernel_set

WIDE = ((64, 8), (40, 20), (120, 10), (320, 32), (512, 32), (960, 32), (510, 5), (512, 2), (1024, 2), (1026, 3))
"""Channels and groups: of U-Nets, and those that fill blocks of CUDA's kernel in part, or with one group."""
NETS = {
    "random": list(map(Net.of, range(24))),
    "wide": [
        Net("dynamo", (Block(channels, groups, 1e-5, "silu"),), "float32", (2, 8 - at % 2, 5 + at), at)
        for at, (channels, groups) in enumerate(WIDE)
    ],
    "large": [
        Net("dynamo", (Block(64, 8, 1e-5, "silu"),), "float32", (33, 32, 32), 0),
        Net("traced", (Block(16, 2, 1e-5, "none"),), "float32", (1, 37, 53), 1),
        Net("traced", (Block(16, 4, 1e-5, "none"),), "float16", (2, 1, 1031), 2),
    ],
}


@pytest.mark.parametrize("precision", ["f32", "f16"])
@pytest.mark.parametrize("nets", NETS)
def test_nets_are_what_float64_gives(nets: str, precision: str, device: Device) -> None:
    """In NCHW and, on CUDA, also with convolutions in NHWC, whose transpositions cancel those around a norm."""
    if device.kind not in ("cpu", "cuda"):
        pytest.skip("only CUDA has a kernel; the CPU shows that nothing changes without one")
    fuses = device.kind == "cuda"
    wrong = []
    for net, layout in itertools.product(NETS[nets], [{}, {"prefer_nhwc": "1"}] if fuses else [{}]):
        options = CompileOptions(fusion=True, precision=precision, provider_options=layout)
        with rlx_ort.load(net.model().SerializeToString(), options=options) as runner:
            model = export_model(runner.graph, options, kernel_set(working_provider(device), runner.graph, options))
            found = Counter(node.op_type for node in model.nodes)
            assert found["GroupNorm"] == (len(net.blocks) if fuses else 0)
            (y,) = runner.run(device, {"x": net.feed})
        close = 2e-2 if "16" in precision + net.dtype else 2e-4
        error = float(np.max(np.abs(y - net.expected()) / (1 + np.abs(net.expected()))))
        wrong += [] if error < close else [(error, layout, net)]
    assert not wrong
