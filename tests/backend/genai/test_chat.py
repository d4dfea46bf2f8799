"""`examples/chat.py`: lines are answered as they come, Ctrl-C ends one answer, and an empty line the chat."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from genai_folders import edit_config, greedy_tokens, write_folder, write_tokenizer

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "chat.py"
LETTERS = "abcdefghijklmnopqrstuvwxyz "

pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("tokenizers", "onnxruntime_genai")),
    reason="neither tokenizers nor onnxruntime-genai is installed; nox --session genai has both",
)


def text_of(tokens: list[int]) -> str:
    """Return the letters of tokens; a few tokens have none."""
    return "".join(LETTERS[token] for token in tokens if token < len(LETTERS))


def test_an_answer_goes_on_from_the_whole_conversation(tmp_path: Path) -> None:
    """The second answer follows the first line, its answer and the second line."""
    write_tokenizer(write_folder(tmp_path))
    edit_config(tmp_path, context_length=400)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path)], input="cab\ndo\n\n", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first = greedy_tokens([2, 0, 1], 100)
    second = greedy_tokens([2, 0, 1, *first, 3, 14], 100)
    assert "on cpu" in done.stdout
    assert [part.strip("\n") for part in done.stdout.split("> ")[1:]] == [text_of(first), text_of(second), ""]


@pytest.mark.skipif(sys.platform == "win32", reason="a child is not sent Ctrl-C alone there")
def test_ctrl_c_ends_an_answer_and_not_the_chat(tmp_path: Path) -> None:
    """The next line is answered."""
    write_tokenizer(write_folder(tmp_path))
    edit_config(tmp_path, context_length=1 << 20)
    program = EXAMPLE.read_text(encoding="utf-8").replace(
        "max_new_tokens=100", "max_new_tokens=20 if 24 in text else None"
    )
    program = program.replace("rlx_ort.genai.open(", "rlx_ort.genai.open(max_length=1 << 20, folder=")
    (tmp_path / "chat.py").write_text(program, encoding="utf-8")
    # A shell's background jobs inherit that SIGINT is ignored.
    heard = "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    heard += "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    started = [sys.executable, "-u", "-c", heard, str(tmp_path / "chat.py"), str(tmp_path)]
    with subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"cab\n")
        process.stdin.flush()
        process.stdout.readline()
        process.stdout.read(40)  # of the first answer
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(b"y\n\n", timeout=60)
    assert process.returncode == 0, errors.decode()
    assert rest.count(b"> ") == 2
