"""Records on disk: what is read back, what counts as none, and what happens where nothing can be written."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from rlx_ort import kept


def _answer(document: dict[str, Any]) -> int:
    return int(document["answer"])


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    """In a folder that is made for it."""
    path = tmp_path / "deep" / "record.json"
    assert kept.write(path, 3, {"answer": 42})
    assert kept.read(path, 3, _answer) == 42


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"7", b"\xff", b'{"answer": 42}', b'{"schema": 2, "answer": 42}', b'{"schema": 3}',
     b'{"schema": 3, "answer": []}', b'{"schema": 3, "answer": "x"}'],
)  # fmt: skip
def test_a_record_that_is_damaged_or_of_another_version_is_none(text: bytes, tmp_path: Path) -> None:
    """Reading it raises nothing, so the work is done again."""
    (tmp_path / "record.json").write_bytes(text)
    assert kept.read(tmp_path / "record.json", 3, _answer) is None


def test_damage_is_logged_and_absence_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A first run is no news."""
    with caplog.at_level(logging.INFO):
        kept.read(tmp_path / "absent.json", 3, _answer)
        assert not caplog.records
        (tmp_path / "record.json").write_bytes(b"{")
        kept.read(tmp_path / "record.json", 3, _answer)
    assert "damaged" in caplog.text


def test_a_record_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is a warning with the reason."""
    (tmp_path / "file").write_bytes(b"")
    assert not kept.write(tmp_path / "file" / "record.json", 3, {})
    assert "cannot be kept" in caplog.text


def test_a_lock_tells_whether_another_holder_had_it(tmp_path: Path) -> None:
    """The first to come does not wait; where the other does not end, none is held."""
    path = tmp_path / "record.json"
    with kept.locked(path, 0.1) as waited:
        assert not waited
        with kept.locked(path, 0.1) as second:
            assert second
    with kept.locked(path, 0.1) as again:
        assert not again


def test_a_digest_depends_on_the_facts_and_not_on_the_process() -> None:
    """It names a file for other processes."""
    assert kept.digest_of(("a", 1)) == kept.digest_of(("a", 1)) != kept.digest_of(("a", "1"))
    assert os.path.basename(kept.digest_of("../x")) == kept.digest_of("../x")  # noqa: PTH119  # no folder in it
