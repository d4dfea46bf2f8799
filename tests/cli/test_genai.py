"""`genai`: the ranking of a language model's variants and devices, and the text that it writes."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Cli
from genai_folders import edit_config, greedy_tokens, write_folder, write_tokenizer

PROMPT = [3, 14, 15, 9, 2, 6]
IDS = ",".join(map(str, PROMPT))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a tiny model."""
    return write_folder(tmp_path / "model")


def test_the_ranking_is_printed_without_opening_anything(cli: Cli, folder: Path) -> None:
    """What was chosen, for which text, with how much memory, and the devices that are not here."""
    outcome = cli("genai", folder, "--new-tokens", 10)
    assert outcome.code == 0
    lines = " ".join(outcome.out.split())
    assert "llama, 1 layers, 64 tokens of context" in lines
    assert "ranked for 54 tokens of prompt, 10 new tokens" in lines
    assert "all 13 nodes on cpu" in lines
    assert "4 KiB for 64 tokens" in lines
    assert "not here: tpu, cuda" in lines


def test_the_ranking_as_json_has_every_device(cli: Cli, folder: Path) -> None:
    """The document has the prediction or the reason for each."""
    document = cli("genai", folder, "--json").document
    assert document["chosen"] == {"variant": "", "device": "cpu"}
    assert document["cache_bytes"] == 2 * 8 * 4 * 64
    rows = {row["device"]: row for row in document["candidates"]}
    assert rows["cpu"]["total_ns"] > rows["cpu"]["prefill_ns"] > 0
    assert "rlx_ort" in rows["cpu"]["engines"]
    assert rows["rocm"]["blocker"]


def test_no_line_is_wider_than_a_terminal(folder: Path, tmp_path: Path) -> None:
    """Names, times and engines of four variants fit into 80 columns."""
    pytest.importorskip("pty", reason="there are no pseudo-terminals here")
    import os
    import pty

    for name in ("cpu-int4-rtn", "webgpu-int4"):
        write_folder(tmp_path / "variants" / name)
    main, other = pty.openpty()
    command = [sys.executable, "-m", "rlx_ort", "genai", str(tmp_path / "variants"), "--only", "cpu"]
    variables = {**os.environ, "COLUMNS": "80", "TERM": "dumb"}
    process = subprocess.Popen(command, stdout=other, stderr=subprocess.DEVNULL, env=variables)
    os.close(other)
    text = b""
    while True:
        try:
            part = os.read(main, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        text += part
    os.close(main)
    assert process.wait() == 0
    lines = text.decode().splitlines()
    assert any("cpu-int4-rtn" in line and "rlx_ort" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_tokens_go_on_from_tokens(cli: Cli, folder: Path) -> None:
    """Tokens are on stdout, where they were made and how fast on stderr."""
    outcome = cli("genai", folder, "--device", "cpu", "--engine", "rlx_ort", "--ids", IDS, "--new-tokens", 8)
    assert outcome.code == 0
    assert outcome.out.splitlines()[-1].split() == [str(token) for token in greedy_tokens(PROMPT, 8)]
    assert "on cpu, by the decode loop of rlx_ort; nodes: " in outcome.err
    assert "8 tokens in " in outcome.err
    assert "tokens per second" in outcome.err


def test_tokens_as_json_are_one_document(cli: Cli, folder: Path) -> None:
    """Nothing else is on stdout."""
    document = cli("genai", folder, "--device", "cpu", "--ids", IDS, "--new-tokens", 8, "--json").document
    assert document["run"]["tokens"] == greedy_tokens(PROMPT, 8)
    assert document["run"]["prompt"] == PROMPT
    assert document["run"]["device"] == "cpu"


def test_text_goes_on_from_text(cli: Cli, folder: Path) -> None:
    """The tokenizer of the folder turns the prompt into tokens and tokens into text."""
    if not any(importlib.util.find_spec(name) for name in ("tokenizers", "onnxruntime_genai")):
        pytest.skip("neither tokenizers nor onnxruntime-genai is installed")
    write_tokenizer(folder)
    outcome = cli("genai", folder, "--device", "cpu", "--prompt", "cab", "--new-tokens", 5)
    assert outcome.code == 0
    letters = "abcdefghijklmnopqrstuvwxyz "
    expected = "".join(letters[token] for token in greedy_tokens([2, 0, 1], 5) if token < len(letters))
    assert outcome.out.splitlines()[-1] == expected


def test_text_without_a_tokenizer_is_an_error_before_anything_is_opened(cli: Cli, folder: Path) -> None:
    """The message says what to give instead."""
    cli("genai", folder, "--prompt", "text").fails(4, "no tokenizer.json; give tokens instead")


def test_a_variant_that_cannot_be_read_is_listed(cli: Cli, tmp_path: Path) -> None:
    """The others are ranked."""
    write_folder(tmp_path / "good", session_options={"intra_op_num_thread": "1"})
    edit_config(write_folder(tmp_path / "bad"), type=None)
    outcome = cli("genai", tmp_path, "--only", "cpu")
    assert outcome.code == 0
    assert "bad cannot be read: " in outcome.err
    assert "'intra_op_num_threads'" in outcome.err


def test_a_device_that_is_not_here_is_an_error(cli: Cli, folder: Path) -> None:
    """With the reason."""
    cli("genai", folder, "--device", "rocm").fails(3, "rocm: ")


def test_prompt_and_ids_exclude_each_other(cli: Cli, folder: Path) -> None:
    """Which of the two would be used is not guessed, and tokens are numbers."""
    assert cli("genai", folder, "--prompt", "a", "--ids", "1").code == 2
    assert cli("genai", folder, "--ids", "1,b").code == 2


@pytest.mark.skipif(sys.platform == "win32", reason="a child is not sent Ctrl-C alone there")
@pytest.mark.parametrize("engine", ["rlx_ort", "genai"])
def test_ctrl_c_ends_a_text(folder: Path, engine: str) -> None:
    """The speed until then is printed, and the exit code is that of an interrupt."""
    if engine == "genai" and importlib.util.find_spec("onnxruntime_genai") is None:
        pytest.skip("onnxruntime-genai is not installed")
    edit_config(folder, context_length=1 << 20)
    options = ["--device", "cpu", "--engine", engine, "--max-length", str(1 << 20), "--new-tokens", "1000000"]
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from rlx_ort.cli import main; main(sys.argv[1:])"
    child = [sys.executable, "-c", program, "genai", str(folder), "--ids", IDS, *options]
    with subprocess.Popen(child, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith(b" cpu "):  # the last line of the ranking
            assert process.poll() is None
        process.stdout.readline()
        process.stdout.read(20)  # of the text, which is one line
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors.decode()
    assert b"tokens per second" in errors
    assert b"Interrupted" in errors
    assert b"Traceback" not in errors
