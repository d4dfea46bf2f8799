"""The access log: a line of JSON for each request, with the trace that its client named."""

from __future__ import annotations

import datetime
import json
import logging
import re
import time
from typing import Any

from rlx_ort.serving import tracing
from rlx_ort.serving.exchange import Application, Message, Receive, Scope, Send

_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")  # https://www.w3.org/TR/trace-context/
_LONGEST = 300
log = logging.getLogger("rlx_ort.serving.access")
"""Its records are whole lines; give it a handler without a format."""


def to_stderr() -> None:
    """Write the lines on stderr."""
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    log.propagate = False


def write(side: str, method: str, path: str, status: int | str, begun_s: float, **more: Any) -> None:
    """Log a request that began at a time of `time.perf_counter`; further fields are left out if they are None."""
    trace = _TRACE.fullmatch(more.pop("traceparent", None) or "")
    fields = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "side": side,
        "method": method[:_LONGEST],
        "path": path[:_LONGEST],
        "status": status,
        "ms": round((time.perf_counter() - begun_s) * 1e3, 3),
        "trace_id": tracing.trace_id() or (trace[1] if trace else None),
        **more,
    }
    log.info(json.dumps({name: value for name, value in fields.items() if value is not None}))


class Logged:
    """An ASGI application whose requests are logged."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, then log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s, status = time.perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            client = scope["client"][0] if scope.get("client") else None
            sizes = {"bytes": headers.get(b"content-length"), "traceparent": headers.get(b"traceparent")}
            write("http", scope["method"], scope["path"], status, begun_s, client=client, **sizes)
