"""What a person sees: tables of 80 and 120 columns, suggestions, completion; and what a program gets as JSON."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from command_line import Cli

from rlx_ort.cli import main, show

SCREENS = (
    ("devices",),
    ("devices", "--all"),
    ("doctor",),
    ("inspect", "{model}"),
    ("report", "{model}"),
    ("report", "{model}", "--all"),
    ("bench", "{model}", "--runs", "2"),
    ("run", "{model}"),
    ("calibrate", "--show"),
)


PROGRAM = """
import sys
from rlx_ort.cli import main
for line in sys.stdin.read().splitlines():
    main(line.split("|"), standalone_mode=False)
    print("=====", flush=True)
"""


def _on_terminal(columns: int, screens: list[list[str]]) -> list[list[str]]:
    """Return the lines that each command prints on a terminal of so many columns; one process runs them all."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    given = "\n".join("|".join(screen) for screen in screens)
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=theirs, stderr=subprocess.DEVNULL, env=environ | {"TERM": "dumb"}
    ) as process:
        os.close(theirs)
        assert process.stdin is not None
        process.stdin.write(given.encode())
        process.stdin.close()
        data = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while piece := os.read(ours, 65536):
                data += piece
    os.close(ours)
    assert process.returncode == 0
    return [screen.splitlines() for screen in data.decode().replace("\r\n", "\n").split("=====\n")[:-1]]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudoterminals in Python")
@pytest.mark.parametrize("columns", [80, 120])
def test_no_table_is_wider_than_the_terminal(add_one: Path, columns: int) -> None:
    """Tables fold at the terminal's width, no number is broken, and remedies are whole lines."""
    screens = [[part.format(model=add_one) for part in screen] for screen in SCREENS]
    printed = _on_terminal(columns, screens)
    assert len(printed) == len(screens)
    for screen, lines in zip(SCREENS, printed, strict=True):
        remedies = {at + 1 for at, line in enumerate(lines) if line.startswith("for ") and line.endswith(":")}
        wide = [line for at, line in enumerate(lines) if len(line) > columns and at not in remedies]
        assert wide == [], screen
    by_screen = {screen: "\n".join(lines) for screen, lines in zip(SCREENS, printed, strict=True)}
    assert "--all shows why" in by_screen["devices",]
    assert "\n  pip install" in by_screen["devices", "--all"]
    assert "100%" in by_screen[SCREENS[6]]


def test_what_cannot_be_used_is_one_line(cli: Cli, add_one: Path) -> None:
    """`devices` and `report` have a row for each device that works, and `--all` the others with reasons."""
    for arguments in (("devices",), ("report", add_one)):
        short, full = cli(*arguments).out, cli(*arguments, "--all").out
        assert "tpu" in short.splitlines()[-1]
        assert "no ONNX Runtime" not in short
        assert "no ONNX Runtime" in full


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("benhc",), "did you mean 'bench'"), (("package", "verfiy"), "did you mean 'verify'")],
    ids=("command", "subcommand"),
)
def test_a_misspelt_command_gets_a_suggestion(cli: Cli, arguments: tuple[str, ...], word: str) -> None:
    """Exit code 2, and the nearest name."""
    cli(*arguments).fails(2, word)


@pytest.mark.parametrize(
    ("typed", "begun", "found"),
    [
        (["run", "m.onnx", "--device"], "web", ["webgpu"]),
        (["bench", "m.onnx", "--device"], "cpu,cu", ["cpu,cuda"]),
        (["report", "m.onnx", "--only"], "tens", ["tensorrt"]),
        (["package", "warm", "p", "--device"], "op", ["opengl", "openvino"]),
    ],
)
def test_the_shell_completes_device_names(typed: list[str], begun: str, found: list[str]) -> None:
    """Of every option that names devices, also the last of a list."""
    items = ShellComplete(main, {}, "rlx-ort", "_COMPLETE").get_completions(typed, begun)
    assert sorted(item.value for item in items) == found


def test_documents_have_a_schema_number_and_failures_are_documents(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """One document each, whatever happens."""
    assert cli("devices", "--json").document["schema"] == 1
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    for arguments, code, kind in (
        (("run", broken), 4, "ConversionError"),
        (("run", add_one, "--device", "cpuu"), 2, "DeviceParseError"),
        (("run", add_one, "--nonsense"), 2, "UsageError"),
        (("package", "inspect", broken), 7, "IntegrityError"),
    ):
        outcome = cli(*arguments, "--json")
        error = outcome.document["error"]
        assert (outcome.code, error["exit_code"], error["type"]) == (code, code, kind)
        assert error["message"] in outcome.err
    other = cli("compare", add_one, add_one, "--device", "cpu", "--tolerance", "0", "--json")
    assert other.document["schema"] == 1


@pytest.mark.parametrize(
    ("command", "shown", "hidden"),
    [("bench", "--device ", "--devices"), ("bench", "--device ", "--only"), ("report", "--device ", "--only ")],
)
def test_an_option_has_one_name_in_the_help(cli: Cli, add_one: Path, command: str, shown: str, hidden: str) -> None:
    """Older names work and are not shown."""
    text = cli(command, "--help").out
    options = [line for line in text.splitlines() if line.lstrip().startswith("--")]
    assert [line for line in options if shown in line] != []
    assert [line for line in options if hidden in line] == []
    assert cli(command, add_one, hidden.strip(), "cpu").code == 0


class _Nul(io.StringIO):
    """Has a descriptor that counts as a terminal and has no size, as NUL on Windows."""

    def isatty(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of a file without a size."""
        return 3


def test_what_counts_as_a_terminal_and_is_none_gets_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar on it would redirect stdout, and the results would be lost."""
    monkeypatch.setattr(sys, "stderr", stream := _Nul())
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: (_ for _ in ()).throw(OSError(6, "The handle is invalid")))
    out = sys.stdout
    with show.progress("working") as shown, show.steps() as (begin, _):
        begin("one")
        assert shown is None
        assert sys.stdout is out
    assert stream.getvalue() == ""
