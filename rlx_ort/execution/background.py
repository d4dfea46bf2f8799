"""The calls of a compiled graph that do not wait for a run, or wait for many."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlx_ort.execution.inputs import InputPlan, ResidentFeeds
from rlx_ort.execution.pipeline import Pipeline, run_all, snapshot
from rlx_ort.execution.run_async import run_in_background

if TYPE_CHECKING:
    from rlx_ort.execution.engine_slot import Engine, EngineSlot

__all__ = ["BackgroundRuns"]


class BackgroundRuns(abc.ABC):
    """Committed, pipelined and awaited runs."""

    _inputs: InputPlan
    _output_names: list[str]
    _pipeline: Pipeline
    _plain: bool
    _slot: EngineSlot

    @abc.abstractmethod
    def run(self, inputs: Mapping[str, Any] | None = None) -> list[Any]:
        """Run once and return the outputs."""

    @abc.abstractmethod
    def _engine(self) -> Engine:
        """Return an engine with the newest weights."""

    @abc.abstractmethod
    def _run_now(self, inputs: Mapping[str, Any], indices: Sequence[int]) -> list[Any]:
        """Run with handles and the extent as they are, and return the listed outputs."""

    def commit_no_wait(self, inputs: Mapping[str, Any]) -> None:
        """Run in the background, after the runs committed before; handles are fed, the outputs are dropped.

        Arrays are copied, so they may be written to at once. Errors come from `sync_pending`.
        """
        ready = snapshot(inputs)
        self._pipeline.commit(lambda: self._run_now(ready, ()))

    def sync_pending(self) -> None:
        """Wait for the committed runs, and raise the first error among them."""
        self._pipeline.sync()

    def run_pipelined(self, inputs: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
        """Run once for each set of inputs and return the outputs of each, equal to those of runs one by one.

        Runs that take long enough overlap, unless the graph has handles or the device runs one session at a time.

        Raises:
            InputError: an input is wrong.
            EngineError: a run failed.
        """
        return run_all(self.run, inputs, overlap=self._plain and not self._slot.provider.exclusive)

    async def run_async(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Run in a thread and return the outputs as `run` does; cancelling the task stops the run at its next node.

        Arrays are not copied: leave them alone until the run has ended. A run that uses handles goes on to its end,
        so that the handles are whole.

        Raises:
            InputError: an input is wrong.
            EngineError: the run failed.
        """
        if not self._plain:
            return await run_in_background(lambda: self.run(inputs), _nothing)
        engine = self._engine()
        feeds = self._inputs.feeds(inputs, engine)
        if feeds.__class__ is ResidentFeeds:
            return await run_in_background(lambda: engine.binder.run(feeds, self._output_names, ()), _nothing)
        once = engine.binder.stoppable()
        return await run_in_background(lambda: once.run(self._output_names, feeds), once.stop)


def _nothing() -> None:
    """Do nothing, where a run cannot be stopped."""
