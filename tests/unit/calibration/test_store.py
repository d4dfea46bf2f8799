"""Profiles on disk: found again where they belong, ignored with a reason where they do not."""

from __future__ import annotations

import errno
import logging
from typing import Any

import pytest

from rlx_ort.calibration import store
from rlx_ort.calibration.profile import CalibrationProfile
from rlx_ort.device import Device


def test_a_kept_profile_is_found_by_the_next_process(here: Any) -> None:
    """What one process wrote, another reads whole."""
    profile = here.profile()
    assert store.keep(Device.CUDA, profile) == here.file
    store.forget()
    assert store.find(Device.CUDA).profile == profile


def test_without_a_profile_the_store_says_how_to_get_one(here: Any) -> None:
    """The reason names the command."""
    found = store.find(Device.CUDA)
    assert found.profile is None
    assert "rlx-ort calibrate" in found.reason


def test_a_damaged_file_counts_as_none(here: Any) -> None:
    """Half a file is no error, only a reason to measure again."""
    store.keep(Device.CUDA, here.profile())
    here.file.write_text(here.file.read_text(encoding="utf-8")[:200], encoding="utf-8")
    store.forget()
    found = store.find(Device.CUDA)
    assert found.profile is None
    assert "measured again" in found.reason


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hardware": "Card 2", "driver": "500.1"}, "hardware"),
        ({"hardware": "Card 1", "driver": "501.0"}, "driver"),
        ({"hardware": "Card 1", "driver": "500.1", "engine": "onnxruntime 1.32.0"}, "engine"),
    ],
)
def test_a_profile_of_another_machine_or_version_is_ignored_with_the_difference(
    change: dict[str, str], word: str, here: Any
) -> None:
    """The reason names what differs."""
    store.keep(Device.CUDA, here.profile())
    here.install(**change)
    found = store.find(Device.CUDA)
    assert found.profile is None
    assert word in found.reason


def test_a_profile_that_was_copied_over_another_is_ignored(here: Any) -> None:
    """The key inside counts, whatever the file is called."""
    text = here.profile().to_json()
    here.install("Card 2", "500.1")
    store.keep(Device.CUDA, here.profile())
    here.file.write_text(text, encoding="utf-8")
    store.forget()
    assert "hardware is 'Card 2' here, 'Card 1' there" in store.find(Device.CUDA).reason


def test_a_new_profile_replaces_the_old_one_in_a_running_process(here: Any) -> None:
    """The file is looked at each time, so another process's calibration counts at once."""
    store.keep(Device.CUDA, here.profile())
    assert store.find(Device.CUDA).profile == here.profile()
    newer = here.profile(elapsed_s=7.25)
    here.file.write_text(newer.to_json(), encoding="utf-8")
    assert store.find(Device.CUDA).profile == newer


def test_a_full_disk_costs_the_file_and_not_the_profile(
    here: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The measurement counts for this process, with a warning."""

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "write_atomic", full)
    with caplog.at_level(logging.WARNING):
        assert store.keep(Device.CUDA, here.profile()) is None
    assert "No space left" in caplog.text
    assert store.find(Device.CUDA).profile == here.profile()


def test_a_cache_folder_that_cannot_be_made_costs_the_file_and_not_the_profile(
    here: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the folder would be is a file, as on a read-only system nothing can be made there."""
    blocked = here.folder / "file"
    blocked.write_text("", encoding="utf-8")
    monkeypatch.setenv("RLX_CACHE_DIR", str(blocked))
    with caplog.at_level(logging.WARNING), store.locked(Device.CUDA) as waited:
        assert store.keep(Device.CUDA, here.profile()) is None
    assert not waited
    assert "cannot be kept" in caplog.text
    assert store.find(Device.CUDA).profile == here.profile()


def test_writing_leaves_nothing_but_the_profile(here: Any) -> None:
    """The file appears under its name in one step, and no part of it is left over."""
    store.keep(Device.CUDA, here.profile())
    assert list(here.file.parent.iterdir()) == [here.file]


def test_the_date_of_a_profile_does_not_matter(here: Any) -> None:
    """A wall clock that jumped makes no profile invalid."""
    store.keep(Device.CUDA, here.profile(measured="2099-01-01T00:00:00+00:00"))
    store.forget()
    assert store.find(Device.CUDA).profile is not None


def test_a_profile_survives_the_way_to_json_and_back(here: Any) -> None:
    """Every field comes back as it was."""
    profile = here.profile(machine="M", quick=True, elapsed_s=1.5, skipped={"Attention": "no kernel"})
    assert CalibrationProfile.from_json(profile.to_json()) == profile
