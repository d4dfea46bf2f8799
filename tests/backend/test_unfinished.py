"""What a process that was killed was writing is removed, and nothing of one that lives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from sample_packages.packages import make_graph

from rlx_ort.converters.files import save_onnx
from rlx_ort.deploy.create import create_package
from rlx_ort.deploy.triton import export_triton
from rlx_ort.storage import clear_unfinished, write_atomic

# Each writes half of something and waits, so that it can be killed in the middle.
_BEGIN = """
import sys, time
from pathlib import Path
def wait(*_, **__):
    print("half", flush=True)
    time.sleep(60)
target = Path(sys.argv[1])
"""
_HALVES = {
    "file": """
from rlx_ort.storage import replacing
with replacing(target) as stream:
    stream.write(b"half")
    stream.flush()
    wait()
""",
    "conversion": """
from rlx_ort.converters.files import staging
with staging(target) as stage:
    (stage.path.parent / "half.onnx").write_bytes(b"half")
    wait()
""",
    "package": """
sys.path.insert(0, sys.argv[2])
import rlx_ort.deploy.write as write
from rlx_ort.deploy.create import create_package
from sample_packages.packages import make_graph
write._write = wait
create_package(make_graph(), target, folder=True)
""",
}
_WRITES: dict[str, Callable[[Path], object]] = {
    "file": lambda folder: write_atomic(folder / "other", b"whole"),
    "conversion": lambda folder: save_onnx(make_graph(), folder / "other.onnx"),
    "package": lambda folder: create_package(make_graph(), folder / "other.ortpackage", folder=True),
    "triton": lambda folder: export_triton(make_graph(), folder, "other"),
}


@pytest.fixture(params=_HALVES)
def writer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """Give a process that has written half of something into `tmp_path`."""
    command = [sys.executable, "-c", _BEGIN + _HALVES[request.param], str(tmp_path / "target")]
    command.append(str(Path(__file__).parents[1] / "helpers"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        assert len(_hidden(tmp_path)) == 1
        yield child
        child.kill()


def _hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_living_process_keeps_what_it_writes_and_a_killed_one_does_not(
    writer: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Whoever looks; before the parent has waited for the killed process as well as after it."""
    [name] = _hidden(tmp_path)
    assert clear_unfinished(tmp_path) == []
    assert _hidden(tmp_path) == [name]
    writer.kill()
    if sys.platform == "win32":
        writer.wait()
    else:
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)  # it is dead, and its id still there
    assert clear_unfinished(tmp_path.parent, below=True) == [tmp_path / name]
    assert _hidden(tmp_path) == []


@pytest.mark.parametrize("writer", ["file"], indirect=True)
@pytest.mark.parametrize("write", _WRITES)
def test_the_next_write_into_the_folder_removes_it(writer: subprocess.Popen[str], tmp_path: Path, write: str) -> None:
    """Under whatever name it writes, and in every way of writing."""
    writer.kill()
    writer.wait()
    _WRITES[write](tmp_path)
    assert _hidden(tmp_path) == []


@pytest.mark.parametrize(
    "name",
    [
        *(".a.0123456789abcdef.partial", ".a.1-0123456789abcdef.converting"),
        ".a.00000000-1-0123456789abcdef.partial",
    ],
)
def test_what_cannot_be_told_stays_for_a_day(tmp_path: Path, name: str) -> None:
    """That of an older version, and of a process of another machine or container, whose ids mean nothing here."""
    for path in (tmp_path / name, tmp_path / f"{name}.kept"):
        path.write_bytes(b"half")
    assert clear_unfinished(tmp_path) == []
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    assert clear_unfinished(tmp_path) == [tmp_path / name]


def test_a_process_with_the_id_of_a_dead_one_keeps_nothing_of_it(tmp_path: Path) -> None:
    """Ids are used again; this process began after the last write."""
    with pytest.raises(KeyError):
        _interrupted(tmp_path)
    [name] = _hidden(tmp_path)
    assert clear_unfinished(tmp_path) == []
    os.utime(tmp_path / name, (1, 1))
    assert clear_unfinished(tmp_path) == [tmp_path / name]


def _interrupted(folder: Path) -> None:
    """Leave a file under the name that this process gives it, as a power failure does."""
    from rlx_ort.storage import partial_path

    partial_path(folder / "target").write_bytes(np.zeros(4).tobytes())
    raise KeyError


def test_the_command_cleans_the_cache_and_the_folders_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints what it deleted, and leaves all else."""
    from click.testing import CliRunner

    from rlx_ort.cli.cache import command

    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    for folder in ("cache/copies", "models/deep", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
        for name in (".a.0123456789abcdef.partial", "a.onnx", ".hidden"):
            (tmp_path / folder / name).write_bytes(b"")
            os.utime(tmp_path / folder / name, (0, 0))
    outcome = CliRunner().invoke(command, ["clean", str(tmp_path / "models"), "--json"])
    assert outcome.exit_code == 0, outcome.output
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob(".a*"))
    assert left == ["elsewhere/.a.0123456789abcdef.partial"]
    assert len(list(tmp_path.rglob("*"))) == 5 + 6 + 1
