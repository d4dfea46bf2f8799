"""The examples of docs/serving.md run as they stand, and so does the example client."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_models import WEIGHT, Served, started_command

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
MAKING, EMBEDDING = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ASKED = re.findall(r"```bash\n(curl .*?)```(?:\n\n```json\n(.*?)```)?", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the page's model was made."""
    found = tmp_path_factory.mktemp("page")
    subprocess.run([sys.executable, "-c", MAKING], cwd=found, check=True)
    return found


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Yield the REST address of the page's server."""
    process, rest, _ = started_command([str(folder / "models"), "--device", "cpu"])
    yield rest
    process.terminate()
    process.wait(30)


@pytest.mark.skipif(sys.platform == "win32", reason="the commands are for a POSIX shell")
@pytest.mark.parametrize(("command", "expected"), ASKED, ids=range(len(ASKED)))
def test_the_curl_examples_run(address: str, command: str, expected: str) -> None:
    """With the answer that the page shows."""
    command = command.replace("localhost:8000", address)
    result = subprocess.run(command, shell=True, capture_output=True, check=True)
    assert result.stdout
    if expected:
        assert json.loads(result.stdout) == json.loads(expected)


def test_the_application_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lifespan loads the models, and the mounted paths answer."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "page"}

    async def ask() -> list[dict[str, Any]]:
        exec(compile(EMBEDDING, "serving.md", "exec"), names)
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        path = "/models/v2/models/double"
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "headers": [],
            "root_path": "",
        }
        scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("localhost", 80)}
        async with names["lifespan"](names["app"]):
            await names["app"](scope, receive, send)
        return sent

    start, body = asyncio.run(ask())
    assert start["status"] == 200
    assert json.loads(body["body"])["name"] == "double"


def test_the_example_client_sends_binary_tensors(served: Served) -> None:
    """Its outputs are those of the model; as a script it prints them."""
    import serve_client

    client = serve_client.Client(served.http)
    x = np.array([[1, 2, 3, 4]], np.float32)
    outputs = client.infer("product", {"x": x})
    client.close()
    np.testing.assert_allclose(outputs["matmul"], x @ WEIGHT)
    command = [sys.executable, str(ROOT / "examples" / "serve_client.py"), served.http, "product", "2"]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
    assert "matmul float32 [2, 3]" in result.stdout
