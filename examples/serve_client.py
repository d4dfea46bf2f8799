"""Asks a server of the Open Inference Protocol with random inputs, in binary form and without any package but numpy.

python examples/serve_client.py 127.0.0.1:8000 MODEL            the token, if any, from the variable SERVE_TOKEN
python examples/serve_client.py 127.0.0.1:8000 MODEL 8          open dims of another size than 1
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
DTYPES = {
    "BOOL": np.bool_, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
}  # fmt: skip
ATTEMPTS = 6
"""A request changes nothing on the server, so it may be sent again: when the queue is full (429), no model is ready
(503), the connection broke, or the answer is a 500 without JSON, which a proxy gives where a server behind it ended."""
LENGTH = "Inference-Header-Content-Length"


class Client:
    """A connection to a server; it stays open between requests."""

    def __init__(self, address: str, token: str = "") -> None:
        self._connection = http.client.HTTPConnection(address, timeout=60)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def metadata(self, model: str) -> dict[str, Any]:
        """Return names, types and shapes of a model's inputs and outputs."""
        found: dict[str, Any] = json.loads(self._ask("GET", f"/v2/models/{model}")[0])
        return found

    def infer(self, model: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs for some inputs."""
        datatypes = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
        tensors = [
            {
                "name": name,
                "shape": array.shape,
                "datatype": datatypes[array.dtype],
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, array in inputs.items()
        ]
        head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
        parts = b"".join([head, *(np.ascontiguousarray(array).tobytes() for array in inputs.values())])
        body, length = self._ask("POST", f"/v2/models/{model}/infer", parts, {LENGTH: str(len(head))})
        outputs, at = {}, length
        for output in json.loads(body[:length])["outputs"]:
            size = output["parameters"]["binary_data_size"]
            flat: npt.NDArray[Any] = np.frombuffer(body[at : at + size], DTYPES[output["datatype"]])
            outputs[output["name"]], at = flat.reshape(output["shape"]), at + size
        return outputs

    def _ask(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Any:
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(0.1 * 2**attempt)
            try:
                self._connection.request(method, path, body, {**self._headers, **(headers or {})})
                answer = self._connection.getresponse()
                found = answer.read()
            except (http.client.HTTPException, ConnectionError) as err:
                self._connection.close()  # the next request opens it again
                last = f"{type(err).__name__}: {err}"
                continue
            if answer.status == 200:
                return found, int(answer.headers.get(LENGTH, len(found)))
            ours = found.startswith(b"{")
            last = f"{answer.status}: {json.loads(found)['error'] if ours else found.decode(errors='replace')}"
            if answer.status not in (429, 503) and (answer.status != 500 or ours):
                break
        raise SystemExit(last)


def random_inputs(metadata: Mapping[str, Any], open_dim: int) -> dict[str, Array]:
    """Return random numbers of each input's type; open dims get one size."""
    draw = np.random.default_rng(0)
    return {
        tensor["name"]: draw.integers(0, 2, [open_dim if size < 0 else size for size in tensor["shape"]]).astype(
            DTYPES[tensor["datatype"]]
        )
        for tensor in metadata["inputs"]
    }


def main(address: str, model: str, *sizes: str) -> None:
    """Print the outputs of one request."""
    client = Client(address, os.environ.get("SERVE_TOKEN", ""))
    inputs = random_inputs(client.metadata(model), int(sizes[-1]) if sizes else 1)
    for name, array in client.infer(model, inputs).items():
        print(f"{name} {array.dtype} {list(array.shape)}: {array.ravel()[:8]}")
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
