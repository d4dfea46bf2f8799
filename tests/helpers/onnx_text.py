"""Models from ONNX's text form, as tests write them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser

__all__ = ["parsed"]


def parsed(text: str, opset: int = 21, ir_version: int = 10, imports: str = "", **weights: object) -> onnx.ModelProto:
    """Return the model of a text such as `(float[2] x) => (float[2] y) { y = Add (x, w) }`.

    `imports` has further domains, such as `"my.ops": 1`. Arrays in `weights` become initializers of their names.
    """
    opsets = f'"": {opset}{imports and ", "}{imports}'
    model = onnx.parser.parse_model(f"<ir_version: {ir_version}, opset_import: [{opsets}]> g {text}")
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()
    )
    return model
