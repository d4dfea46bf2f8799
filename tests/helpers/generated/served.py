"""A server's application in this process, asked for one model by several clients at a time."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from interpreter import Array

from rlx_ort import Device, DevicePolicy, DType, Graph, ServingError, save_onnx
from rlx_ort.serving.options import ServeOptions
from rlx_ort.serving.protocol import DATATYPES
from rlx_ort.serving.repository import Repository
from rlx_ort.serving.rest import create_app
from rlx_ort.serving.scheduler import BatchOptions

__all__ = ["Served"]

_NAME = "served"
_DTYPES = {name: dtype for dtype, name in DATATYPES.items()}
_BATCH = BatchOptions(max_batch=2, delay_s=0.002)  # rows of two clients are joined, and three rows are cut into pieces


class Served:
    """The application with a graph on a device.

    Raises:
        RlxError: the graph cannot be served.
    """

    def __init__(self, device: Device, graph: Graph, folder: Path) -> None:
        path = folder / f"{_NAME}.onnx"
        save_onnx(graph, path)
        self._loop = asyncio.new_event_loop()
        self._outputs = graph.output_names
        self._repository = Repository([path], ServeOptions(DevicePolicy.only([device]), _BATCH))
        self._app = create_app(self._repository, load=False)
        try:
            self._loop.run_until_complete(self._repository.load(_NAME))
        except BaseException:
            self.close()
            raise

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Return the outputs; where the server joins rows, they come from three clients with one row or more each.

        Elsewhere two clients ask for the same.

        Raises:
            ServingError: a client got an error that the server has a status and a text for.
        """
        if self._repository.find(_NAME).batched_along is not None:
            rows = len(next(iter(feeds.values())))
            ends = [0, *(end for end in (1, 2) if end < rows), rows]
            parts = [{name: array[a:b] for name, array in feeds.items()} for a, b in itertools.pairwise(ends)]
            found = self._loop.run_until_complete(self._together(parts))
            return [np.concatenate([part[index] for part in found]) for index in range(len(self._outputs))]
        return self._loop.run_until_complete(self._together([feeds, feeds]))[1]

    def close(self) -> None:
        """End the server."""
        self._loop.run_until_complete(self._repository.close())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _together(self, parts: Sequence[Mapping[str, Array]]) -> list[list[Array]]:
        """Return the answer of each client.

        Raises:
            ServingError: the server refuses one of them.
        """
        found = await asyncio.gather(*(self._asked(part) for part in parts), return_exceptions=True)
        for answer in found:
            if isinstance(answer, BaseException):
                raise answer
        return found  # type: ignore[return-value]  # no errors by now

    async def _asked(self, feeds: Mapping[str, Array]) -> list[Array]:
        inputs, data = [], []
        for name, array in feeds.items():
            data.append(np.ascontiguousarray(array).tobytes())
            datatype = DATATYPES[DType.from_numpy(array.dtype)]
            size = {"binary_data_size": len(data[-1])}
            inputs.append({"name": name, "datatype": datatype, "shape": array.shape, "parameters": size})
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        status, length, body = await self._posted(head, head + b"".join(data))
        document = json.loads(body[:length])
        if status == 500 and "internal error" in document["error"]:
            raise RuntimeError(f"the server answered {status}: {document['error']}")
        if status != 200:
            raise ServingError(document["error"], status)
        found: dict[str, Array] = {}
        at = length
        for output in document["outputs"]:
            end = at + output["parameters"]["binary_data_size"]
            dtype = _DTYPES[output["datatype"]].numpy
            found[output["name"]] = np.frombuffer(body[at:end], dtype).reshape(output["shape"])
            at = end
        return [found[name] for name in self._outputs]

    async def _posted(self, head: bytes, body: bytes) -> tuple[int, int, bytes]:
        """Return the status of an answer, the length of its JSON, and its body."""
        key = b"inference-header-content-length"
        headers = [(b"host", b"here"), (key, b"%d" % len(head)), (b"content-length", b"%d" % len(body))]
        scope = {"type": "http", "method": "POST", "path": f"/v2/models/{_NAME}/infer", "headers": headers}
        sent: list[dict[str, Any]] = []
        given = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            if given:
                return given.pop()
            return await asyncio.get_running_loop().create_future()  # the client stays

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        answer = b"".join(message.get("body", b"") for message in sent)
        length = dict(sent[0]["headers"]).get(key)
        return sent[0]["status"], int(length) if length else len(answer), answer
