"""Every exception `rlx_ort` raises, in one tree.

```
RlxError
  DeviceError
    DeviceParseError(ValueError)     a device name, list or chain does not parse
    DeviceUnavailableError           a device the user named cannot run here
    NoViableDeviceError              no device is left under the policy
    DeviceFallbackError              every device of a chain refused or failed
  GraphError
    GraphVerifyError                 the graph itself is wrong
    LegalizeError                    a device cannot take the graph
    ConversionError                  a model cannot be read, written or translated
      WriteError(PackageError)       a file cannot be written
  RunError
    InputError(ValueError)           a run was fed something the graph does not take
    ParamError(ValueError)           a parameter is unset, unknown or of the wrong type
    PlacementError                   nodes ran, or would run, somewhere else than asked
    EngineError                      ONNX Runtime failed; its exception is the cause
    TimeLimitError                   a run took longer than it was allowed to
    CancelledRunError                the caller cancelled the run
    StateLossError                   a device failed that holds state which cannot move to another
    MemoryBudgetError                a session does not fit into the memory budget of its device
  ServingError                       a request to a server cannot be answered
  CalibrationError                   a device cannot be measured
  PackageError
    IntegrityError                   the contents of a package contradict its manifest
  ParityError                        two models or devices differ by more than was allowed
  MissingExtraError                  an optional package is missing; also each class that a call without it raises
```

A message says what was asked, what was found, and what to do. `exit_code` is what the command line returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

E = TypeVar("E", bound=BaseException)


class AnyDevice(Protocol):
    """A `Device`, whose module imports this one."""

    @property
    def kind(self) -> str:
        """Its kind, such as `cuda`."""

    @property
    def index(self) -> int:
        """Its index among those of the kind."""

    @property
    def label(self) -> str:
        """The token that parses back to it."""

    @property
    def display(self) -> str:
        """The name that people read."""


_advises_options = False


@contextlib.contextmanager
def advising_options() -> Iterator[None]:
    """Have messages of this process name options of the command line while a block runs, in every thread."""
    global _advises_options
    before, _advises_options = _advises_options, True
    try:
        yield
    finally:
        _advises_options = before


def advice(python: str, option: str) -> str:
    """Return a remedy as the caller can apply it: by an argument in Python, or by an option of the command line.

    Messages become reasons of other errors, rows of tables and log lines, so they are right from the start.
    """
    return option if _advises_options else python


def cpu_help() -> str:
    """Return the remedy for nodes that a device leaves."""
    return "let the CPU help " + advice(
        "with CompileOptions(placement=PlacementRule.ASSISTED)",
        "(--assisted of `run`, `compare` and `genai`, no --device in other commands)",
    )


class RlxError(Exception):
    """Base of every error that `rlx_ort` raises on purpose."""

    exit_code = 1


class DeviceError(RlxError):
    """A device was asked for that cannot be had."""

    exit_code = 3


class DeviceParseError(DeviceError, ValueError):
    """A device name or device list does not parse; `input` is the text as given."""

    exit_code = 2

    def __init__(self, input: str, message: str) -> None:
        super().__init__(message)
        self.input = input
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the arguments, so that the error crosses a process pool."""
        return type(self), (self.input, self.message)


class DeviceUnavailableError(DeviceError):
    """A device that was named cannot run here; with the `reason` and the `remedy`."""

    def __init__(self, device: AnyDevice, reason: str, remedy: str = "") -> None:
        text = f"{device.display} is not available: {reason}"
        super().__init__(f"{text}\n  {remedy}" if remedy else text)
        self.device = device
        self.reason = reason
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the arguments, so that the error crosses a process pool."""
        return type(self), (self.device, self.reason, self.remedy)


class NoViableDeviceError(DeviceError):
    """No device is left under the policy; `blockers` lists each device with its reason."""

    def __init__(self, message: str, blockers: Sequence[tuple[AnyDevice, str]] = ()) -> None:
        lines = [message, *(f"  {device.label}: {reason}" for device, reason in blockers)]
        super().__init__("\n".join(lines))
        self.blockers = tuple(blockers)


class DeviceFallbackError(DeviceError):
    """Every device of a chain refused or failed; `attempts` holds one (device, reason) per entry, in order.

    A text in place of the attempts is one attempt of the CPU.
    """

    def __init__(self, attempts: Iterable[tuple[AnyDevice, str]] | str) -> None:
        import rlx_ort  # its public name is loaded here, since the module of devices imports this one

        self.attempts = ((rlx_ort.Device.CPU, attempts),) if isinstance(attempts, str) else tuple(attempts)
        lines = [f"  {device.label}: {reason}" for device, reason in self.attempts]
        super().__init__("\n".join(["all devices of the chain failed:", *lines]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the arguments, so that the error crosses a process pool."""
        return type(self), (self.attempts,)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceFallbackError):
            return NotImplemented
        return self.attempts == other.attempts

    def __hash__(self) -> int:
        return hash(self.attempts)


class GraphError(RlxError):
    """A graph or model is wrong, or cannot be translated."""

    exit_code = 4


class GraphVerifyError(GraphError):
    """A graph breaks a rule of the IR; the message names the node and the remedy."""


class LegalizeError(GraphError):
    """A device cannot take the graph; `report` is the `KernelDispatchReport` that says which nodes."""

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class ConversionError(GraphError):
    """A model cannot be read, written or translated; no partial file is left behind."""


class RunError(RlxError):
    """A run could not start or did not finish."""

    exit_code = 5


class InputError(RunError, ValueError):
    """A run was fed a missing, unknown or mistyped input; the message names it."""


class ParamError(RunError, ValueError):
    """A parameter is unset, unknown, or of another shape or dtype than declared."""


class PlacementError(RunError):
    """Nodes are not where they were asked to be; `placement` says where each one is."""

    def __init__(self, message: str, placement: Any = None) -> None:
        super().__init__(message)
        self.placement = placement


class EngineError(RunError):
    """ONNX Runtime failed while loading or running a model; its own exception is `__cause__`."""


class StageError(EngineError):
    """A stage of a split graph failed; `device` is the stage's, and the cause says who is at fault.

    Attributes:
        device: the device of the stage.
    """

    def __init__(self, device: AnyDevice, number: int, count: int, cause: BaseException) -> None:
        self.device = device
        super().__init__(f"stage {number} of {count}, on {device.display}: {cause}")


class TimeLimitError(RunError):
    """A run took longer than its time limit and was stopped, or given up where the engine did not return."""


class CancelledRunError(RunError):
    """A run was cancelled by its `CancelToken`."""


class StateLossError(RunError):
    """A device failed that holds handles, caches or committed runs, which cannot move to another device."""


class MemoryBudgetError(RunError):
    """A session does not fit into the memory of its device, or into its budget beside those that are in use."""


class ServingError(RlxError):
    """A request cannot be answered; `status` is the HTTP status that it gets.

    `retry_after_s` is how many seconds later it may be, where that can be predicted.
    """

    def __init__(self, message: str, status: int = 500, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the arguments, so that the error crosses a process pool."""
        return type(self), (str(self), self.status, self.retry_after_s)


class CalibrationError(RlxError):
    """A device could not be measured."""

    exit_code = 6


class PackageError(RlxError):
    """A model package cannot be read or written."""

    exit_code = 7


class IntegrityError(PackageError):
    """The contents of a package contradict its manifest."""


class ParityError(RlxError):
    """Two models or two devices differ by more than was allowed; `comparison` says by how much and where."""

    exit_code = 8

    def __init__(self, message: str, comparison: Any = None) -> None:
        super().__init__(message)
        self.comparison = comparison


class WriteError(ConversionError, PackageError):
    """A file cannot be written: its folder, its rights or the space on the disk are the reason."""

    exit_code = 9


class MissingExtraError(ConversionError, PackageError, EngineError, ServingError):
    """A package that an extra brings is missing or does not import; the last line has the command that installs it.

    It is a kind of each class that users of the feature catch.
    """

    exit_code = 10


def install_command(extra: str, *more: str) -> str:
    """Return the command that installs `rlx_ort` with an extra, and more arguments of pip.

    The package is not published yet, so a checkout is installed; a comment of the shell says so.
    """
    return " ".join(("pip install", f'".[{extra}]"', *more, " # in a checkout of rlx_ort"))


def let_go(error: BaseException) -> None:
    """Let an error keep nothing alive: the frames of its traceback refer to sessions, arrays and mapped files.

    Otherwise memory stays taken, and Windows deletes and replaces none of the files, as long as someone has the error.
    Variables of a closure are kept all the same, and those of functions that have not returned.
    """
    import traceback  # not needed by a program without errors

    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__


def as_cause(error: E) -> E:
    """Return an error that a generator of `contextmanager` has caught, as the cause of the one that it raises.

    From Python 3.13 on, the frame of the generator leads back to the error; that cycle would keep the values in the
    frames of the traceback until garbage is collected.
    """
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def near_names(name: str, known: Iterable[str]) -> str:
    """Return a hint for a name that is not there: the nearest ones, else the first few."""
    import difflib  # not needed by a program without errors

    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=3)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    listed = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
    return f"known are {listed}" if names else "there are none"
