"""Files that were cut off, changed or made on purpose: a typed error, or a model that was read, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_models.source_files import SOURCES, damaged, read_all, write_source

from rlx_ort.errors import ConversionError

COPIES = 150


@pytest.mark.parametrize("kind", SOURCES)
def test_damaged_copies_of_a_file_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    """Whatever bytes are changed, nothing but ConversionError comes out."""
    if kind == "gguf":
        pytest.importorskip("gguf")
    path = write_source(kind, tmp_path)
    read_all(kind, path)
    refused = 0
    for number, content in enumerate(damaged(path.read_bytes(), COPIES, seed=11)):
        copy = tmp_path / f"copy{number % 4}"
        copy.unlink(missing_ok=True)
        copy.write_bytes(content)
        try:
            read_all(kind, copy)
        except ConversionError:
            refused += 1
    assert refused > COPIES // 5  # every fifth copy is cut off, and most of those lack something


@pytest.mark.parametrize("kind", SOURCES)
def test_every_file_that_was_cut_off_is_refused(kind: str, tmp_path: Path) -> None:
    """No prefix of a file is taken for the whole; data that only pads the end apart."""
    if kind == "gguf":
        pytest.importorskip("gguf")
    path = write_source(kind, tmp_path)
    content = path.read_bytes()
    last = len(content.rstrip(b"\0 \n")) - 1
    for length in {*range(0, last, max(1, last // 60)), last}:
        copy = tmp_path / "cut"
        copy.unlink(missing_ok=True)
        copy.write_bytes(content[:length])
        with pytest.raises(ConversionError):
            read_all(kind, copy)
