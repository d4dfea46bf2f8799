"""Profiles on disk: found again where they belong, ignored with a reason where they do not."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
from typing import Any

import pytest

from rlx_ort import CalibrationError, Device
from rlx_ort.calibration import store
from rlx_ort.calibration.features import Kernel
from rlx_ort.calibration.profile import CalibrationProfile, Row


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
    assert "hardware is 'Card 2' here and 'Card 1' there" in store.find(Device.CUDA).reason


def test_a_new_profile_replaces_the_old_one_in_a_running_process(here: Any) -> None:
    """The file is looked at each time, so another process's calibration counts at once."""
    store.keep(Device.CUDA, here.profile())
    assert store.find(Device.CUDA).profile == here.profile()
    newer = here.profile(elapsed_s=7.25)
    here.file.write_text(newer.to_json(), encoding="utf-8")
    assert store.find(Device.CUDA).profile == newer


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


def test_a_profile_survives_the_way_to_json_and_back(here: Any) -> None:
    """Every field comes back as it was."""
    profile = here.profile(machine="M", quick=True, elapsed_s=1.5, skipped={"Attention": "no kernel"})
    assert CalibrationProfile.from_json(profile.to_json()) == profile


def test_added_rows_come_after_those_that_are_there(here: Any) -> None:
    """The file has both, and everything else stays as it was."""
    profile = here.profile(machine="M")
    store.keep(Device.CUDA, profile)
    row = Row("?Det-1", (128,), 900.0, "f64", 0.1, 7)
    store.add(Device.CUDA, [row])
    store.forget()
    assert store.find(Device.CUDA).profile == dataclasses.replace(profile, rows=(*profile.rows, row))


def test_an_added_row_takes_the_place_of_an_earlier_one(here: Any) -> None:
    """Of the same kernel, size and dtype; one of another dtype is another row."""
    store.keep(Device.CUDA, here.profile(rows=(Row("?Det-1", (128,), 900.0), Row("?Det-1", (128,), 950.0, "f64"))))
    store.add(Device.CUDA, [Row("?Det-1", (128,), 300.0)])
    found = store.find(Device.CUDA).profile
    assert found is not None
    assert {(row.dtype, row.ns) for row in found.rows} == {("f32", 300.0), ("f64", 950.0)}


def test_added_rows_change_the_model_of_a_running_process(here: Any) -> None:
    """The next price is the measured one, and what was remembered by the generation is asked for anew."""
    store.keep(Device.CUDA, here.profile())
    kernel = Kernel("Det-1", (128,), "f32", 128.0, 1024.0)
    model, generation = store.measured_model(Device.CUDA), store.generation()
    assert model is not None
    assert model.price(kernel).how == "assumed"
    store.add(Device.CUDA, [Row("?Det-1", (128,), 4321.0)])
    model = store.measured_model(Device.CUDA)
    assert model is not None
    assert model.price(kernel) == (pytest.approx(4321.0), "measured")
    assert store.generation() != generation


def test_rows_for_a_device_without_a_profile_are_not_kept(here: Any) -> None:
    """They would be a profile from which nothing can be predicted."""
    store.add(Device.CUDA, [Row("?Det-1", (128,), 900.0)])
    assert store.find(Device.CUDA).profile is None
    assert not here.file.exists()


def test_another_schema_is_measured_again(here: Any) -> None:
    """The message names both."""
    document = json.loads(here.profile().to_json()) | {"schema": 3}
    with pytest.raises(CalibrationError, match="schema 3, this version reads 5"):
        CalibrationProfile.from_json(json.dumps(document))


@pytest.mark.parametrize("time_ns", [-1.0, float("nan"), float("inf"), "fast", None])
def test_a_time_that_cannot_be_makes_a_file_damaged(time_ns: object, here: Any) -> None:
    """Of a row as well as of the host's pace."""
    document = json.loads(here.profile().to_json())
    for broken in (document | {"rows": [["Add", [8], time_ns, "f32", 0.0, 1]]},):
        with pytest.raises(CalibrationError):
            CalibrationProfile.from_json(json.dumps(broken))


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
