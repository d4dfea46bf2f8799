"""Providers that misbehave when they are asked about a node; importable by the child process that asks them."""

from __future__ import annotations

import os
import time
from typing import ClassVar

from rlx_ort import Device, LegalizeError
from rlx_ort.providers.base import EngineSession, SessionRequest
from rlx_ort.providers.null import NullProvider


class AskedProvider(NullProvider):
    """Takes every node but `Neg`, which it leaves to the CPU, and `Exp`, which it refuses."""

    kinds: ClassVar[tuple[str, ...]] = ("asked",)
    ep_name: ClassVar[str] = "AskedExecutionProvider"
    selectable: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__(takes=lambda node: node.op_type != "Neg")
        self.opened: list[list[str]] = []

    def open(self, request: SessionRequest) -> EngineSession:
        """Open a session unless a node is refused."""
        names = [node.op_type for node in request.model.model.graph.node]
        self.opened.append(names)
        if "Exp" in names:
            raise LegalizeError("no kernel for Exp")
        return super().open(request)

    def question_scope(self, device: Device) -> str | None:
        """Return a scope of its own."""
        return type(self).__name__


class CrashingProvider(AskedProvider):
    """Ends the process on `Abs`, and takes a minute for `Sqrt`."""

    kinds: ClassVar[tuple[str, ...]] = ("crashing",)
    compiles: ClassVar[bool] = True

    def open(self, request: SessionRequest) -> EngineSession:
        """Open a session, or end the process."""
        names = {node.op_type for node in request.model.model.graph.node}
        if "Abs" in names:
            os.abort()
        if "Sqrt" in names:
            time.sleep(60)
        return super().open(request)


class SocialProvider(AskedProvider):
    """Takes `Tanh` only together with other nodes."""

    kinds: ClassVar[tuple[str, ...]] = ("social",)
    compiles: ClassVar[bool] = True

    def open(self, request: SessionRequest) -> EngineSession:
        """Open a session that takes what it takes of this model."""
        alone = len(request.model.model.graph.node) == 1
        self.takes = lambda node: not alone or node.op_type != "Tanh"
        return super().open(request)
