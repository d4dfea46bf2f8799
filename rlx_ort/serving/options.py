"""The options of the server as values: how models are served, and the rights and limits of clients."""

from __future__ import annotations

import hmac
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlx_ort.errors import ServingError
from rlx_ort.serving.budget import DEFAULT_BYTES
from rlx_ort.serving.scheduler import BatchOptions

if TYPE_CHECKING:
    from rlx_ort.resilience.options import Resilience
    from rlx_ort.selection.policy import DevicePolicy

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name))
"""Signals that end a server; SIGBREAK is that of Ctrl-Break on Windows."""
SWITCH_S = 0.001
"""Switch interval of a server's interpreter: so long the event loop waits for a thread that decodes, at each call."""


@dataclass(frozen=True)
class ServeOptions:
    """How models are served.

    Attributes:
        policy: which devices may be used, by default those of the `RLX_*` variables; packages narrow it by their own.
        batch: the limits of each model's queue.
        require_signature: PEM file of the key that must have signed packages.
        signed_only: whether models without a signature are refused, ONNX files among them.
        devices: how many devices of the ranking run a model at the same time.
        resilience: time limits and memory budgets of runs; other devices answer where one fails in any case. None
            for the defaults of `Resilience`.
        load_limit_s: how long each version of a model may take to open and run on its devices, in seconds.
        batch_unproven: names of models that are batched although their rows are not proved independent; "*" for all.
            Rows of different clients then may influence each other.
        most_held_bytes: the most bytes that the requests of all clients take at a time, over REST and gRPC together:
            bytes as they arrive, decoded inputs, and answers until they are read; see `Budget`.
        precision: in which the f32 parts of ONNX files are computed, as `Precision` names it; packages have their own.
    """

    policy: DevicePolicy | None = None
    batch: BatchOptions = field(default_factory=BatchOptions)
    require_signature: str | None = None
    signed_only: bool = False
    devices: int = 8
    resilience: Resilience | None = None
    load_limit_s: float = 600.0
    precision: str = "f32"
    batch_unproven: frozenset[str] = frozenset()
    most_held_bytes: int = DEFAULT_BYTES

    def batches_unproven(self, name: str) -> bool:
        """Return whether a model is batched without a proof that its rows are independent."""
        return not self.batch_unproven.isdisjoint((name, "*"))


@dataclass(frozen=True)
class HttpOptions:
    """The rights of a client.

    Attributes:
        most_bytes: the largest body, before and after it is decompressed.
        token: asked for in `Authorization: Bearer` of every request but those for health; None for no token.
        repository_control: whether clients may load and unload models.
        most_json_bytes: the most JSON of a request, which takes up to 24 times its size in memory.
        hosts: the host names that `Host` and `Origin` may have, against web pages that reach into a private network;
            None allows every `Host`, and as `Origin` only the same.
        access_log: whether `rlx_ort.serving.access` logs a line of JSON for each request.
        traces: whether requests have spans of OpenTelemetry, see `rlx_ort.serving.tracing`; needs the extra `otel`.
    """

    most_bytes: int = 64 << 20
    token: str | None = None
    repository_control: bool = False
    most_json_bytes: int = 8 << 20
    hosts: frozenset[str] | None = None
    access_log: bool = False
    traces: bool = False

    def check_token(self, given: str | bytes, asked: str = "a token: Authorization") -> None:
        """Compare the value of an `Authorization` header in constant time; the error has what is asked for.

        Raises:
            ServingError: it is not the token (401).
        """
        given = given.encode("utf-8", "replace") if isinstance(given, str) else given
        if self.token is not None and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise ServingError(f"this server asks for {asked}: Bearer TOKEN", 401)

    def check_change(self, parameters: Mapping[str, Any]) -> None:
        """Check that models may be loaded and unloaded, with these parameters.

        Raises:
            ServingError: clients may not (403), or the model itself is in the request (400).
        """
        if not self.repository_control:
            raise ServingError("clients may not load and unload models here; start with --repository-control", 403)
        if unknown := [key for key in parameters if key != "unload_dependents"]:
            raise ServingError(f"models come from the server's folders only; leave out {', '.join(unknown)!r}", 400)


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of a client whose request is not complete yet.

    Attributes:
        most: open connections; beyond it, the one that has been idle longest is closed, else the one whose client
            sends its request or reads its answer most slowly.
        idle_s: how long a connection may stay open without a request, in seconds.
        head_s: how long the headers may take, in seconds.
        body_s: how long the body may take before `body_rate` counts, in seconds.
        body_rate: bytes a second that a body must have.
        ending_s: how long a request that is incomplete may still take once the server ends, in seconds.
        write_s: how long an HTTP client may leave an answer unread, in seconds.
        message_s: how long the message of a gRPC call may take, in seconds.
        head_bytes: the most bytes of a request that are neither body nor a complete head.
    """

    most: int = 1000
    idle_s: float = 30.0
    head_s: float = 10.0
    body_s: float = 20.0
    body_rate: int = 16 << 10
    ending_s: float = 3.0
    write_s: float = 60.0
    message_s: float = 60.0
    head_bytes: int = 64 << 10
