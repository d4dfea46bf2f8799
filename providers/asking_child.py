"""Asks a provider in a child process, so that a node which ends the process ends only the child.

The child gets its work on standard input, one JSON line a graph, and answers on standard output, one line a question.
It serves several graphs and ends when none came for a while. When it dies, the question it was at is answered with
that, and another child goes on with the next one.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
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
from rlx_ort.options.compile_options import CompileOptions, Precision
from rlx_ort.providers.answers import DEVICE
from rlx_ort.providers.asking import ask_inside, ask_sheet, asking_options, short_reason
from rlx_ort.providers.base import Provider

__all__ = ["ask_in_child", "main"]

_log = logging.getLogger(__name__)
_IDLE_S = 10.0
"""How long a child waits for another graph: starting one takes half a second."""
_START_S = 30.0
"""How long a child may take to start: importing ONNX Runtime and a provider's libraries, on a slow disk."""


def ask_in_child(
    provider: Provider,
    device: Device,
    sheets: Sequence[tuple[str, Sequence[bytes]]],
    options: CompileOptions,
    budget_s: float,
) -> dict[str, str]:
    """Return the answer to each question by its key; see `asking.ask`. Each comes with its sheets.

    A frozen program cannot start another Python, so there the questions are asked in this process.
    """
    answers: dict[str, str] = {}
    left = list(sheets)
    if getattr(sys, "frozen", False):
        deadline = time.monotonic() + budget_s
        for key, forms in left:
            if time.monotonic() < deadline:
                answers[key] = _answer(provider, device, forms, options)
        return {key: answer for key, answer in answers.items() if answer}
    with _lock:
        deadline = time.monotonic() + budget_s
        while left and time.monotonic() < deadline:
            child = _child()
            found, ended = child.asked(_task(provider, device, left, options), len(left), deadline)
            answers.update(found)
            left = left[len(found) :]
            if not left:
                break
            child.end()
            if ended is None:
                break  # out of time, or the child cannot be used at all
            key, _ = left.pop(0)
            answers[key] = f"asking about it ended the process of {provider.ep_name} (exit code {ended})"
            _log.warning("%s: a question ended its process with exit code %s", device.display, ended)
        _end_when_idle()
    return {key: answer for key, answer in answers.items() if answer}


class _Child:
    """A process that answers questions, task after task, until its input ends."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-c", "from rlx_ort.providers.asking_child import main; main()"]
        self.environment = environment
        self.parent = os.getpid()
        self._patience_s = _START_S
        self._process = subprocess.Popen(  # noqa: S603  # this Python, and a command of ours
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether it can be given a task, by the process that started it."""
        return self.parent == os.getpid() and self._process.poll() is None

    def asked(self, task: bytes, count: int, deadline: float) -> tuple[dict[str, str], int | None]:
        """Return what it answered, in order, and its exit code; None for one that was too slow or did not start."""
        writer = threading.Thread(target=_write, args=(self._process.stdin, task), daemon=True)
        writer.start()
        answers: dict[str, str] = {}
        patience_s = max(deadline - time.monotonic(), 0.1) + self._patience_s
        try:
            while len(answers) < count:
                line = self._lines.get(timeout=patience_s)
                if not line:
                    return answers, self._process.wait(timeout=_START_S)
                self._patience_s = 0.0
                if line.startswith(b"{"):
                    found = json.loads(line)
                    if "key" in found:
                        answers[found["key"]] = found["answer"]
                patience_s = max(deadline - time.monotonic(), 0.1)
        except (queue.Empty, subprocess.TimeoutExpired):
            return answers, None
        return answers, 0

    def end(self) -> None:
        """End the process."""
        if self.parent != os.getpid():
            return  # the process that started it ends it
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]  # both are pipes


_lock = threading.Lock()
_current: _Child | None = None
_timer: threading.Timer | None = None


def _child() -> _Child:
    """Return the child, started anew where the settings changed."""
    global _current
    if _timer is not None:
        _timer.cancel()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONUTF8": "1"}
    if _current is None or not _current.alive or _read_by_us(_current.environment) != _read_by_us(environment):
        if _current is not None:
            _current.end()
        _current = _Child(environment)
    return _current


def _read_by_us(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("RLX_") or name == "PYTHONPATH"}


def _end_when_idle() -> None:
    global _timer
    _timer = threading.Timer(_IDLE_S, _end_child)
    _timer.daemon = True
    _timer.start()


@atexit.register
def _end_child() -> None:
    global _current
    with _lock:
        child, _current = _current, None
        if child is not None:
            child.end()


def _task(
    provider: Provider, device: Device, sheets: Sequence[tuple[str, Sequence[bytes]]], options: CompileOptions
) -> bytes:
    task = {
        "module": type(provider).__module__,
        "class": type(provider).__qualname__,
        "device": device.label,
        "precision": options.precision.value,
        "provider_options": dict(options.provider_options),
        "custom_op_libraries": list(options.custom_op_libraries),
        "sheets": [[key, *(base64.b64encode(form).decode() for form in forms)] for key, forms in sheets],
    }
    return json.dumps(task).encode() + b"\n"


def _write(pipe: IO[bytes], data: bytes) -> None:
    try:
        pipe.write(data)
        pipe.flush()
    except (OSError, ValueError):
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
    """Answer the questions on standard input, a task a line; the child's side of `ask_in_child`."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not an answer
    providers: dict[tuple[str, str], Provider] = {}
    for line in sys.stdin.buffer:
        task = json.loads(line)
        wanted = (task["module"], task["class"])
        if wanted not in providers:
            providers[wanted] = _provider(*wanted)
        options = asking_options(
            CompileOptions(
                precision=Precision(task["precision"]),
                provider_options=task["provider_options"],
                custom_op_libraries=tuple(task["custom_op_libraries"]),
            )
        )
        print(json.dumps({"ready": providers[wanted].name}), file=out, flush=True)
        for found in _all(providers[wanted], Device(task["device"]), task["sheets"], options):
            print(json.dumps(found), file=out, flush=True)
    os._exit(0)  # a provider that crashes when it is unloaded has answered all the same


def _all(
    provider: Provider, device: Device, sheets: Sequence[Sequence[str]], options: CompileOptions
) -> Iterator[dict[str, str]]:
    for key, *forms in sheets:
        yield {"key": key, "answer": _answer(provider, device, [base64.b64decode(form) for form in forms], options)}


def _provider(module: str, name: str) -> Provider:
    from rlx_ort.providers.registry import register_provider

    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    provider: Provider = found()
    register_provider(provider)
    return provider
