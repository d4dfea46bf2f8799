"""The code blocks of a Markdown page, and a program that runs them in order.

`python`  runs, all blocks of a page in one namespace.
`bash`    or no language: commands, one a line. Those of `rlx-ort` run, with exit code 0; `export` is done.
`console` commands after `$ ` and what they print; a following `$ echo $?` with a number states another exit code.
`json`, `toml`  are parsed.
`text`    is what a program prints or a picture; it holds no command and no Python.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:\A|\n\n)((?:    .*\n)+)")
LISTED = re.compile(r"^(?:\d+\.|-) .*\n(?:(?: {2,}.*)?\n)*", re.MULTILINE)
VARIABLE = re.compile(r"([A-Z_]+)=(\S*)$")
SHELL = ("", "bash")
MADE_BY_THE_READER = {
    *("providers/toy.py", "tests/data/devices/toy.toml"),
    *("tests/unit/execution/test_run_preferred.py", "tests/backend/serving/test_most_rows.py"),
}
"""Files that CONTRIBUTING.md has the reader make."""


@dataclass(frozen=True)
class Step:
    """Something of a page to run: Python, or one command with the exit code that it ends with."""

    line: int
    kind: str
    text: str
    code: int = 0


def steps(page: str) -> Iterator[Step]:
    """Yield what a page has to run; raises ValueError for a block of which that is not known."""
    if INDENTED.search(LISTED.sub("\n", BLOCK.sub("", page))):
        raise ValueError("indented code has no language; fence it")
    for match in BLOCK.finditer(page):
        line, language, text = page.count("\n", 0, match.start()) + 1, match[2], textwrap.dedent(match[3])
        if language == "python":
            yield Step(line, "python", text)
        elif language in SHELL:
            lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
            yield from (Step(line, "command", command) for command in lines if command and command[0] != "#")
        elif language == "console":
            yield from _dialogue(line, text)
        elif language in ("json", "toml"):
            {"json": json.loads, "toml": tomllib.loads}[language](text)
        elif language != "text":
            raise ValueError(f"line {line}: nothing is known of blocks in {language!r}")
        elif re.search(r"^(\$ |rlx-ort |import |from \w+ import )", text, re.MULTILINE):
            raise ValueError(f"line {line}: a block of text with a command in it would not be run")


def _dialogue(line: int, text: str) -> Iterator[Step]:
    commands = [part.partition("\n") for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]]
    for (command, *_), after in zip(commands, [*commands[1:], ("", "", "")], strict=True):
        if command != "echo $?":
            yield Step(line, "command", command, int(after[2]) if after[0] == "echo $?" else 0)


def run_page(
    name: str,
    wanted: list[Step],
    folder: Path,
    prepared: str = "",
    timeout_s: float = 120,
    python: str = sys.executable,
) -> None:
    """Run the steps of a page in a process of their own, in a folder; `prepared` is Python that runs before them."""
    program = folder.parent / f"{folder.name}.json"
    todo = [Step(0, "python", prepared), *wanted]
    program.write_text(json.dumps([name, [vars(step) for step in todo]]), encoding="utf-8")
    done = subprocess.run(
        [python, "-P", __file__, str(program)],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout_s,
        env=os.environ
        | {"RLX_CACHE_DIR": str(folder / "cache"), "PYTHONUTF8": "1", "BROWSER": "true"},  # shows nothing
    )
    assert done.returncode == 0, f"{name}:\n{done.stderr}"


def _run(name: str, todo: list[Mapping[str, Any]]) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for step in todo:
        if step["kind"] == "python":  # with the lines of the page in a traceback
            exec(compile("\n" * step["line"] + step["text"], name, "exec"), namespace)
        else:
            _command(f"{name}, line {step['line']}", step["text"], step["code"])


def _command(where: str, text: str, code: int) -> None:
    from click.testing import CliRunner

    from rlx_ort.cli import main

    words = shlex.split(text)
    if words[0] == "export":
        os.environ.update(word.split("=", 1) for word in words[1:])
        return
    variables = {}
    while words and (set_here := VARIABLE.match(words[0])):
        variables[set_here[1]] = set_here[2]
        words.pop(0)
    result = CliRunner().invoke(main, words[1:], env=variables, prog_name="rlx-ort")
    if result.exit_code != code:
        sys.exit(f"{where}: `{text}` ends with {result.exit_code}, not {code}\n{result.output}{result.exception or ''}")


if __name__ == "__main__":
    _run(*json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
