"""`replacing`: files that the command line writes appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlx_ort.cli.show import replacing


def test_two_writers_of_one_file_do_not_write_into_each_other(tmp_path: Path) -> None:
    """Each writes a file of its own, and the last to end wins."""
    path = tmp_path / "out.npz"
    with replacing(path) as first:
        first.write(b"first, ")
        with replacing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
        first.write(b"whole")
    assert path.read_bytes() == b"first, whole"
    assert [found.name for found in tmp_path.iterdir()] == ["out.npz"]


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """The new file is thrown away."""
    path = tmp_path / "out.npz"
    path.write_bytes(b"old")

    def half() -> None:
        with replacing(path) as stream:
            stream.write(b"half")
            raise KeyError("no such array")

    with pytest.raises(KeyError):
        half()
    assert path.read_bytes() == b"old"
    assert [found.name for found in tmp_path.iterdir()] == ["out.npz"]
