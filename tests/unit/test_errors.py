"""The tree of errors: who derives from whom, exit codes, messages, and what survives a process boundary."""

import inspect
import pickle

import pytest

from rlx_ort import Device, errors

# Class -> direct bases within the tree or among the built-ins, and the exit code; from the design.
TREE = {
    "RlxError": (["Exception"], 1),
    "DeviceError": (["RlxError"], 3),
    "DeviceParseError": (["DeviceError", "ValueError"], 2),
    "DeviceUnavailableError": (["DeviceError"], 3),
    "NoViableDeviceError": (["DeviceError"], 3),
    "DeviceFallbackError": (["DeviceError"], 3),
    "GraphError": (["RlxError"], 4),
    "GraphVerifyError": (["GraphError"], 4),
    "LegalizeError": (["GraphError"], 4),
    "ConversionError": (["GraphError"], 4),
    "RunError": (["RlxError"], 5),
    "InputError": (["RunError", "ValueError"], 5),
    "ParamError": (["RunError", "ValueError"], 5),
    "PlacementError": (["RunError"], 5),
    "EngineError": (["RunError"], 5),
    "StageError": (["EngineError"], 5),
    "TimeLimitError": (["RunError"], 5),
    "CancelledRunError": (["RunError"], 5),
    "ServingError": (["RlxError"], 1),
    "StateLossError": (["RunError"], 5),
    "MemoryBudgetError": (["RunError"], 5),
    "CalibrationError": (["RlxError"], 6),
    "PackageError": (["RlxError"], 7),
    "IntegrityError": (["PackageError"], 7),
    "ParityError": (["RlxError"], 8),
    "WriteError": (["ConversionError", "PackageError"], 9),
    "MissingExtraError": (["ConversionError", "PackageError", "EngineError", "ServingError"], 10),
}
INSTANCES = [
    errors.DeviceParseError("gpux", "unknown device 'gpux'"),
    errors.DeviceUnavailableError(Device.CUDA, "no driver", "install one"),
    errors.NoViableDeviceError("nothing left:", [(Device.CUDA, "no driver")]),
    errors.DeviceFallbackError([(Device.CUDA, "no driver"), (Device.CPU, "denied")]),
    errors.LegalizeError("not all nodes", "the report"),
    errors.PlacementError("two strays", "the placement"),
    errors.InputError("'x' is missing"),
    errors.ParityError("too far", "the comparison"),
]


def test_the_tree_is_complete() -> None:
    """Every error class is in the table above."""
    defined = {
        name
        for name, item in inspect.getmembers(errors, inspect.isclass)
        if issubclass(item, Exception) and item.__module__ == errors.__name__
    }
    assert defined == set(TREE)


@pytest.mark.parametrize("name", TREE)
def test_each_error_has_its_place_and_exit_code(name: str) -> None:
    """Bases and exit codes are those of the design."""
    error = getattr(errors, name)
    assert ([base.__name__ for base in error.__bases__], error.exit_code) == TREE[name]


@pytest.mark.parametrize("error", INSTANCES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_its_attributes(error: errors.RlxError) -> None:
    """An error raised in a worker process arrives whole."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_an_unavailable_device_is_shown_with_reason_and_remedy() -> None:
    """The message says which device, why not and what to do."""
    error = errors.DeviceUnavailableError(Device("cuda:1"), "no driver", "install one")
    assert str(error) == "CUDA (cuda:1) is not available: no driver\n  install one"


def test_a_fallback_error_has_a_headline_and_a_line_for_each_attempt() -> None:
    """Attempts are shown as `label: reason`, indented, in order."""
    error = errors.DeviceFallbackError([(Device.CUDA, "no driver"), (Device.CPU, "denied")])
    headline, *lines = str(error).splitlines()
    assert "failed" in headline
    assert lines == ["  cuda: no driver", "  cpu: denied"]


def test_fallback_errors_are_equal_by_their_attempts() -> None:
    """Equality and hash go by value."""
    one = errors.DeviceFallbackError([(Device.CPU, "a")])
    assert one == errors.DeviceFallbackError([(Device.CPU, "a")])
    assert hash(one) == hash(errors.DeviceFallbackError([(Device.CPU, "a")]))
    assert one != errors.DeviceFallbackError([(Device.CPU, "b")])


def test_a_fallback_error_of_a_text_has_one_attempt_of_the_cpu() -> None:
    """A bare reason is what the CPU failed with, also after a trip through pickle."""
    made = errors.DeviceFallbackError("a text")
    for error in (made, pickle.loads(pickle.dumps(made))):
        assert error.attempts == ((Device.CPU, "a text"),)
        assert str(error).splitlines()[1:] == ["  cpu: a text"]


def test_no_viable_device_lists_each_device_with_its_blocker() -> None:
    """The message has one line for each device."""
    error = errors.NoViableDeviceError("nothing left:", [(Device.CUDA, "no driver"), (Device.CPU, "denied")])
    assert str(error).splitlines() == ["nothing left:", "  cuda: no driver", "  cpu: denied"]
    assert error.blockers == ((Device.CUDA, "no driver"), (Device.CPU, "denied"))
