"""The compile cache as a store: keys, finding, making, evicting, and what goes wrong with folders."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from rlx_ort.errors import DeviceParseError
from rlx_ort.providers.engine.compiled import store as store_module
from rlx_ort.providers.engine.compiled.store import (
    DEFAULT_LIMIT_BYTES,
    MANIFEST,
    CacheKey,
    CompileStore,
    differences,
    explain,
    parse_bytes,
    read_cpu_facts,
    read_entry,
    use_of,
)
from rlx_ort.storage import partial_path

PARTS = {"model": "m", "weights": "w", "provider": "P", "engine": "onnxruntime 1"}


def key(**changed: str) -> CacheKey:
    return CacheKey({**PARTS, **changed})


def filler(size: int = 100, byte: bytes = b"x"):
    def fill(folder: Path):
        (folder / "model.onnx").write_bytes(byte * size)

    return fill


@pytest.fixture
def store(tmp_path: Path) -> CompileStore:
    return CompileStore(tmp_path / "compiled", limit=1 << 30)


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_a_key_changes_its_digest(part):
    """What differs in anything is another entry."""
    assert key(**{part: "other"}).digest != key().digest


def test_parts_do_not_run_into_each_other():
    """A text moved from one part to the next is another key."""
    assert CacheKey({"a": "bc", "d": ""}).digest != CacheKey({"a": "b", "cd": ""}).digest


def test_differences_name_what_one_side_lacks():
    """A part that is only in one key is empty in the other."""
    assert differences({"a": "1", "b": "2"}, {"a": "1", "c": "3"}) == (("b", "2", ""), ("c", "", "3"))


def test_an_entry_is_made_once(store):
    """The second session finds what the first one made."""
    made = store.make(key(), "a model", filler())
    again = store.make(key(), "a model", lambda folder: pytest.fail("made twice"))
    assert again.folder == made.folder
    assert (again.folder / "model.onnx").read_bytes() == b"x" * 100


def test_finding_says_when_an_entry_was_last_used(store):
    """A find makes an entry the newest by use, and not by creation."""
    for name in "ab":
        store.make(key(model=name), name, filler())
        os.utime(store.root / key(model=name).digest / MANIFEST, (1_000, 1_000))
    store.find(key(model="a").digest)
    assert [entry.label for entry in store.entries()] == ["a", "b"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.onnx").unlink(),
        lambda folder: (folder / "model.onnx").write_bytes(b"x" * 99),
        lambda folder: (folder / "model.onnx").write_bytes(b"x" * 99 + b"y"),
        lambda folder: (folder / MANIFEST).write_text("{", encoding="utf-8"),
        lambda folder: (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes().replace(b'"m"', b'"n"')),
        lambda folder: (folder / MANIFEST).unlink(),
    ],
    ids=["file gone", "file cut short", "file changed", "manifest cut short", "manifest changed", "no manifest"],
)
def test_a_damaged_entry_is_made_again(store, damage):
    """A damaged entry is never used, and does not stand in the way."""
    store.make(key(), "a model", filler())
    damage(store.root / key().digest)
    assert store.find(key().digest) is None
    assert (store.make(key(), "a model", filler()).folder / "model.onnx").read_bytes() == b"x" * 100


@pytest.mark.parametrize(("place", "found_at_once"), [(0, True), (2_000_000, True), (1_000_000, False)])
def test_large_files_are_checked_at_their_edges_and_wholly_on_request(store, place, found_at_once):
    """A bit that flipped in the middle of a large file is found by the full check."""
    made = store.make(key(), "large", filler(2_000_001))
    with (made.folder / "model.onnx").open("r+b") as stream:
        stream.seek(place)
        stream.write(b"y")
    assert bool(made.problem()) is found_at_once
    assert made.problem(whole=True) == "model.onnx was changed"


def test_entries_used_longest_ago_make_room(tmp_path):
    """The limit counts the files, and the newest entry stays in any case."""
    small = CompileStore(tmp_path / "compiled", limit=250)
    for place, name in enumerate("abcd"):
        small.make(key(model=name), name, filler(100 if name != "d" else 300))
        os.utime(small.root / key(model=name).digest / MANIFEST, (1_000 + place, 1_000 + place))
        if name == "c":
            assert {entry.label for entry in small.entries()} == {"b", "c"}
    assert [entry.label for entry in small.entries()] == ["d"]


def test_an_entry_that_windows_keeps_open_is_not_evicted(store, monkeypatch):
    """Where a mapped file cannot be moved, the entry stays whole and the next one goes."""
    for place, name in enumerate("ab"):
        store.make(key(model=name), name, filler())
        os.utime(store.root / key(model=name).digest / MANIFEST, (1_000 + place, 1_000 + place))
    held, rename = store.root / key(model="a").digest, Path.rename

    def refusing(self: Path, target: Path) -> Path:
        if self == held:
            raise PermissionError(13, "in use")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refusing)
    tight = CompileStore(store.root, limit=0)
    assert tight.evict() == [key(model="b").digest]
    entry = tight.find(key(model="a").digest)
    assert entry is not None
    assert entry.problem(whole=True) == ""
    freed, kept = tight.clear()
    assert (freed, kept) == (0, [key(model="a").digest])


def test_what_dead_processes_left_is_deleted_and_what_is_made_now_is_not(store):
    """A part belongs to the process in its name, if that began before the part was written."""
    store.make(key(), "a model", filler())
    dead, alive = (partial_path(store.root / (digit * 32)) for digit in "01")
    for folder in (dead, alive):
        folder.mkdir()
    os.utime(dead, (1, 1))
    store.evict()
    assert (dead.exists(), alive.exists()) == (False, True)


def test_clearing_deletes_everything(store):
    """Also folders that have no manifest."""
    store.make(key(), "a model", filler())
    (store.root / ("f" * 32)).mkdir()
    assert store.clear() == (100, [])
    assert list(store.root.glob("?" * 32)) == []


def test_a_folder_the_provider_fills_has_the_size_it_has_now(store):
    """Nothing is promised of its files."""
    made = store.make(key(), "engines", lambda folder: None, open_ended=True)
    (made.folder / "engine").write_bytes(b"x" * 50)
    found = store.find(key().digest)
    assert found is not None
    assert found.nbytes == 50 + (made.folder / MANIFEST).stat().st_size


def test_an_entry_of_another_name_is_no_entry(store):
    """A folder that was copied over does not answer for another key."""
    made = store.make(key(), "a model", filler())
    other = store.root / key(model="n").digest
    shutil.copytree(made.folder, other)
    assert read_entry(other) is None


def test_explaining_names_the_parts_that_changed_since_the_nearest_entry(store, monkeypatch):
    """The nearest is the one of the same model or weights with the fewest differences."""
    clock = iter((100.0, 200.0, 300.0))
    monkeypatch.setattr(store_module.time, "time", lambda: next(clock))
    store.make(key(engine="onnxruntime 0", provider="Q"), "far", filler())
    near = store.make(key(engine="onnxruntime 0"), "near", filler())
    store.make(CacheKey({**PARTS, "model": "n", "weights": "v"}), "another model", filler())
    found = explain(key(), store.entries())
    assert found.entry is None
    assert found.nearest == near
    assert found.changed == (("engine", "onnxruntime 0", "onnxruntime 1"),)


def test_explaining_an_entry_looks_at_older_ones_only(store, monkeypatch):
    """Nothing is explained by what came after."""
    clock = iter((100.0, 200.0))
    monkeypatch.setattr(store_module.time, "time", lambda: next(clock))
    first = store.make(key(), "first", filler())
    second = store.make(key(engine="onnxruntime 2"), "second", filler())
    assert explain(CacheKey(first.parts), store.entries()).nearest is None
    assert explain(CacheKey(second.parts), store.entries()).changed == (("engine", "onnxruntime 1", "onnxruntime 2"),)


def test_the_log_says_why_an_entry_was_dropped(store, caplog):
    """A rebuild is no mystery."""
    made = store.make(key(), "a model", filler())
    (made.folder / "model.onnx").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "rlx_ort.cache"):
        store.find(key().digest)
    assert "model.onnx has 0 bytes in place of 100" in caplog.text


@pytest.mark.parametrize(
    ("text", "size"), [("500", 500), ("4G", 4 << 30), ("1.5 GiB", 3 << 29), ("20mb", 20 << 20), ("1T", 1 << 40)]
)
def test_sizes_are_read_with_their_units(text, size):
    """Units count in 1024."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["G", "-1", "4X", "4 G B"])
def test_a_limit_that_is_no_size_is_refused(text, monkeypatch):
    """It is refused where the cache is asked for, before anything is compiled; the cache switched off needs none."""
    monkeypatch.setenv("RLX_CACHE_LIMIT", text)
    for asked in (lambda: CompileStore(Path()).limit, lambda: use_of(None, "found")):
        with pytest.raises(DeviceParseError, match="RLX_CACHE_LIMIT"):
            asked()
    assert use_of(None, "off") == "off"


def test_an_empty_limit_is_the_default(monkeypatch):
    """An empty variable counts as unset."""
    monkeypatch.setenv("RLX_CACHE_LIMIT", "")
    assert CompileStore(Path()).limit == DEFAULT_LIMIT_BYTES


@pytest.mark.parametrize("text", ["onn", "of", "2", "found,on"])
def test_a_misspelt_use_of_the_cache_is_refused(text, monkeypatch):
    """It would otherwise switch the cache on."""
    monkeypatch.setenv("RLX_CACHE", text)
    with pytest.raises(DeviceParseError, match="neither on, off nor found"):
        use_of(None)


@pytest.mark.parametrize(
    ("variable", "default", "use"),
    [
        (None, "off", "off"),
        (None, "found", "found"),
        ("1", "off", "on"),
        ("0", "found", "off"),
        ("FOUND", "off", "found"),
    ],
)
def test_the_variable_says_how_sessions_use_the_cache(variable, default, use, monkeypatch):
    """What the options say comes before."""
    if variable is not None:
        monkeypatch.setenv("RLX_CACHE", variable)
    assert use_of(None, default) == use
    assert use_of("on", default) == "on"


def test_cpu_facts_are_those_of_the_first_processor(tmp_path):
    """Instructions that no kernel asks for do not count."""
    table = tmp_path / "cpuinfo"
    table.write_text(
        "processor\t: 0\nmodel name\t: One\nflags\t\t: fpu avx2 fma avx\n\nprocessor\t: 1\nmodel name\t: Two\n",
        encoding="utf-8",
    )
    found = read_cpu_facts(table)
    assert (found["cpu"], found["cpu_instructions"]) == ("One", "avx avx2 fma")


def test_cpu_facts_without_a_table_are_what_the_system_says(tmp_path, monkeypatch):
    """Windows names family, model and stepping."""
    monkeypatch.setenv("PROCESSOR_IDENTIFIER", "AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD")
    assert read_cpu_facts(tmp_path / "none")["cpu_instructions"].startswith("AMD64 Family 25")
