"""What ONNX Runtime's own device policies do with a graph: the comparison a user would make first."""

from __future__ import annotations

import statistics
from typing import Any

from regret.measure import time_runs
from rlx_ort.converters.to_onnx import to_onnx
from rlx_ort.ir.graph import Graph
from rlx_ort.providers.engine import runtime

__all__ = ["POLICIES", "measure_policy"]

POLICIES = ("PREFER_GPU", "MAX_PERFORMANCE")


def measure_policy(policy: str, graph: Graph, inputs: dict[str, Any], budget_s: float) -> tuple[float, list[str]]:
    """Return the median time of a run in ns under one of ONNX Runtime's policies, and the providers it took."""
    engine = runtime.onnxruntime()
    options = engine.SessionOptions()
    options.log_severity_level = 4
    options.set_provider_selection_policy(getattr(engine.OrtExecutionProviderDevicePolicy, policy))
    model = to_onnx(graph)
    session = engine.InferenceSession(model.SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    times = time_runs(lambda: session.run(names, inputs), budget_s)
    return float(statistics.median(times)), list(session.get_providers())
