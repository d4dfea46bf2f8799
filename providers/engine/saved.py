"""`SavedSession`: a model of the compile cache on the CPU, opened as it is and without anything of the graph.

This module loads little, since a process that starts from a warmed package waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlx_ort.errors import EngineError
from rlx_ort.providers.engine.runtime import engine_exceptions, onnxruntime
from rlx_ort.providers.engine.shutdown import refuse_at_the_end, watch
from rlx_ort.providers.engine.threads import budget

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["SavedSession"]


class SavedSession:
    """ONNX Runtime's session on a saved model. `run` may be called from several threads.

    Without `packed` it uses the weights as they lie in the file, which takes 0.03 s for 440 MB of weights in place of
    0.2 s, since ONNX Runtime packs them anew to find what was saved; runs are then 1.1 to 2 times slower.

    Args:
        model: the saved model.
        owner: what the session counts for in the thread budget; all sessions of one owner count once.
        packed: whether kernels pack their weights.

    Attributes:
        stopped: whether the process is about to end, so that no run may begin.

    Raises:
        EngineError: ONNX Runtime cannot be used, or refuses the model, or the process ends.
    """

    def __init__(self, model: Path, owner: object, *, packed: bool) -> None:
        refuse_at_the_end()
        engine = onnxruntime()
        options = engine.SessionOptions()
        options.graph_optimization_level = engine.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        if not packed:
            options.add_session_config_entry("session.disable_prepacking", "1")
            # It is there for a few runs, and workers that spin would take the cores of what else is starting.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        budget().apply(options, None, owner, on_cpu=True)
        providers = ["CPUExecutionProvider"]
        try:
            self._session = engine.InferenceSession(str(model), options, providers=providers, enable_fallback=0)
        except engine_exceptions() as err:
            raise EngineError(f"the saved model {model} does not open: {err}") from err
        budget().hold(self._session, None, owner, on_cpu=True)
        self.stopped = False
        self._options = engine.RunOptions()
        watch(self)

    def run(self, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """Run once and return the named outputs as numpy arrays.

        Raises:
            EngineError: the run failed, or the process ends.
        """
        if self.stopped:
            raise EngineError("the process ends, and no run begins any more")
        try:
            results: list[Any] = self._session.run(list(output_names), dict(feeds), self._options)
        except engine_exceptions() as err:
            raise EngineError(f"the run failed: {err}") from err
        return results

    def stop_runs(self) -> None:
        """End all runs that are in flight and let no other begin; for the end of the process."""
        self.stopped = True
        self._options.terminate = True
