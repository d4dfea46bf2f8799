"""`tune`: a table of what was tried, and a record that later commands take."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Cli

from rlx_ort import tuning
from rlx_ort.cli.options import Duration


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave no record to other tests, and race briefly."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_RACE_S", 0.02)


def test_the_table_has_each_variant_with_its_outcome(cli: Cli, add_one: Path) -> None:
    """And the last line says what is faster by how much."""
    outcome = cli("tune", add_one, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert "spinning=False" in outcome.out
    assert "not allowed" in outcome.out  # f16, to see what it would give
    assert "with the options as they are" in outcome.out


@pytest.mark.parametrize(
    ("text", "seconds"), [("60", 60.0), ("90s", 90.0), ("1.5 min", 90.0), ("500ms", 0.5), (".5h", 1800.0), ("0", 0.0)]
)
def test_times_take_units(text: str, seconds: float) -> None:
    """A number alone is in the option's own unit."""
    assert Duration("s", 0.0).convert(text, None, None) == seconds
    assert Duration("ms", 0.0).convert("2s", None, None) == 2000.0


def test_the_record_is_kept_and_packed(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """`package create --tuned` carries it."""
    outcome = cli("tune", add_one, "--device", "cpu", "--json")
    assert outcome.document["kept"]
    assert outcome.document["run_ns"] <= outcome.document["usual_ns"]
    variant = ", ".join(f"{name}={value}" for name, value in sorted(outcome.document["variant"].items()))
    assert cli("run", add_one, "--device", "cpu", "--json").document["tuned"] == (variant or None)
    packed = cli("package", "create", add_one, "-o", tmp_path / "p.rlx", "--tuned")
    assert packed.code == 0, packed.err
    assert "tunings.json" in cli("package", "inspect", tmp_path / "p.rlx", "--json").out


def test_a_model_that_was_never_tuned_is_not_packed_as_tuned(cli: Cli, add_one: Path, tmp_path: Path) -> None:
    """The error has the command."""
    outcome = cli("package", "create", add_one, "-o", tmp_path / "p.rlx", "--tuned")
    assert outcome.code == 2
    assert "rlx-ort tune" in outcome.err
    assert not (tmp_path / "p.rlx").exists()


def test_a_run_takes_a_winner_and_says_so(cli: Cli, add_one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with another precision does not."""
    monkeypatch.setattr(tuning, "WORTH", 1e9)
    monkeypatch.setattr(tuning, "_CLEARLY", 0.0)
    assert cli("tune", add_one, "--device", "cpu").code == 0
    assert "set_denormal_as_zero=1" in cli("run", add_one, "--device", "cpu").out
    other = cli("run", add_one, "--device", "cpu", "--precision", "f16", "--json")
    assert other.document["tuned"] is None
