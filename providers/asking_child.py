"""Asks a provider in a child process, so that a node which ends the process ends only the child.

The child gets its work on standard input and answers on standard output, one JSON line a question. When it dies, the
question it was at is answered with that, and another child goes on with the next one.
"""

from __future__ import annotations

import base64
import importlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError, RlxError
from rlx_ort.execution.options import CompileOptions, Precision
from rlx_ort.providers.answers import DEVICE
from rlx_ort.providers.asking import ask_inside, ask_sheet, asking_options, short_reason
from rlx_ort.providers.base import Provider

__all__ = ["ask_in_child", "main"]

_log = logging.getLogger(__name__)
_START_S = 30.0
"""How long a child may take to start: importing ONNX Runtime and a provider's libraries, on a slow disk."""


def ask_in_child(
    provider: Provider,
    device: Device,
    sheets: Sequence[tuple[str, Sequence[bytes]]],
    options: CompileOptions,
    budget_s: float,
) -> dict[str, str]:
    """Return the answer to each sheet of one question by its key; see `asking.ask`.

    A frozen program cannot start another Python, so there the questions are asked in this process.
    """
    answers: dict[str, str] = {}
    left = list(sheets)
    deadline = time.monotonic() + budget_s
    if getattr(sys, "frozen", False):
        for key, forms in left:
            if time.monotonic() < deadline:
                answers[key] = _answer(provider, device, forms, options)
        return {key: answer for key, answer in answers.items() if answer}
    while left and time.monotonic() < deadline:
        found, ended = _one_child(provider, device, left, options, deadline)
        answers.update(found)
        left = left[len(found) :]
        if ended is None:
            break  # out of time, or the child cannot be used at all
        if left and ended:
            key, _ = left.pop(0)
            answers[key] = f"asking about it ended the process of {provider.ep_name} (exit code {ended})"
            _log.warning("%s: a question ended its process with exit code %s", device.display, ended)
    return {key: answer for key, answer in answers.items() if answer}


def _one_child(
    provider: Provider,
    device: Device,
    sheets: Sequence[tuple[str, Sequence[bytes]]],
    options: CompileOptions,
    deadline: float,
) -> tuple[dict[str, str], int | None]:
    """Return what one child answered, in order, and its exit code; None for one that was stopped or did not start."""
    task = {
        "module": type(provider).__module__,
        "class": type(provider).__qualname__,
        "device": device.label,
        "precision": options.precision.value,
        "provider_options": dict(options.provider_options),
        "custom_op_libraries": list(options.custom_op_libraries),
        "sheets": [[key, *(base64.b64encode(form).decode() for form in forms)] for key, forms in sheets],
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", "from rlx_ort.providers.asking_child import main; main()"]
    child = subprocess.Popen(  # noqa: S603  # this Python, and a command of ours
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    assert child.stdin is not None and child.stdout is not None  # noqa: S101, PT018  # both are pipes
    lines: queue.Queue[bytes] = queue.Queue()
    threads = [
        threading.Thread(target=_write, args=(child.stdin, json.dumps(task).encode()), daemon=True),
        threading.Thread(target=_read, args=(child.stdout, lines), daemon=True),
    ]
    for thread in threads:
        thread.start()
    answers: dict[str, str] = {}
    patience = max(deadline - time.monotonic(), 0.0) + _START_S
    try:
        while True:
            line = lines.get(timeout=patience)
            if not line:
                return answers, child.wait(timeout=_START_S) if len(answers) < len(sheets) else 0
            if line.startswith(b"{"):
                found = json.loads(line)
                if "key" in found:
                    answers[found["key"]] = found["answer"]
            patience = max(deadline - time.monotonic(), 0.1)
    except (queue.Empty, subprocess.TimeoutExpired):
        return answers, None
    finally:
        child.kill()
        child.wait()
        for thread in threads:
            thread.join()
        child.stdout.close()


def _write(pipe: IO[bytes], data: bytes) -> None:
    try:
        with pipe:
            pipe.write(data)
    except OSError:
        return  # the child is gone, which its exit code says


def _read(pipe: IO[bytes], lines: queue.Queue[bytes]) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(b"")


def _answer(provider: Provider, device: Device, forms: Sequence[bytes], options: CompileOptions) -> str:
    """Return the answer to a node alone, or that to the node between neighbours if alone it is not taken."""
    answer = ""
    for ask_form, form in zip((_ask_alone, ask_inside), forms, strict=False):
        try:
            found = ask_form(provider, device, form, options)
        except DeviceUnavailableError:
            return ""  # the device, not the node, is at fault
        except RlxError as err:
            found = short_reason(err)
        if found == DEVICE:
            return found
        answer = answer or found
    return answer


def _ask_alone(provider: Provider, device: Device, sheet: bytes, options: CompileOptions) -> str:
    return ask_sheet(provider, device, sheet, options)[0]


def main() -> None:
    """Answer the questions on standard input; the child's side of `ask_in_child`."""
    task = json.loads(sys.stdin.buffer.read())
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not an answer
    provider = _provider(task)
    options = asking_options(
        CompileOptions(
            precision=Precision(task["precision"]),
            provider_options=task["provider_options"],
            custom_op_libraries=tuple(task["custom_op_libraries"]),
        )
    )
    print(json.dumps({"ready": provider.name}), file=out, flush=True)
    for found in _all(provider, Device(task["device"]), task["sheets"], options):
        print(json.dumps(found), file=out, flush=True)
    os._exit(0)  # a provider that crashes when it is unloaded has answered all the same


def _all(
    provider: Provider, device: Device, sheets: Sequence[Sequence[str]], options: CompileOptions
) -> Iterator[dict[str, str]]:
    for key, *forms in sheets:
        yield {"key": key, "answer": _answer(provider, device, [base64.b64decode(form) for form in forms], options)}


def _provider(task: Mapping[str, Any]) -> Provider:
    from rlx_ort.providers.registry import register_provider

    found: Any = importlib.import_module(task["module"])
    for name in task["class"].split("."):
        found = getattr(found, name)
    provider: Provider = found()
    register_provider(provider)
    return provider
