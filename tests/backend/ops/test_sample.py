"""Sampling draws the tokens that the definition gives for a seed, on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from op_tests.philox import stream

from rlx_ort.device import Device
from rlx_ort.execution.session import Session
from rlx_ort.ir.graph import Graph

Array = npt.NDArray[Any]
VOCABULARY = 50


def logits(rows: int, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).normal(size=(rows, VOCABULARY)) * 2).astype(np.float32)


def run(device: Device, values: Array, rows: Any, **settings: Any) -> Array:
    """Sample strictly on the device; `rows` declares the number of rows, or a name for it."""
    g = Graph()
    x = g.input("x", [*([rows] if values.ndim == 2 else []), values.shape[-1]])
    g.outputs = [g.sample(x, **settings)]
    return Session(device).compile(g).run({"x": values})[0]


def chances(row: Array, top_k: int, top_p: float, temperature: float) -> Array:
    """Return the probability of each token by the definition, in float64."""
    scaled = row.astype(np.float64) / max(temperature, 1e-6)
    kept = scaled >= np.sort(scaled)[-top_k] if 0 < top_k < row.size else np.ones(row.size, bool)
    weights = np.where(kept, np.exp(scaled - scaled.max()), 0)
    weights /= weights.sum()
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        count = int(np.searchsorted(np.cumsum(weights[order]), top_p)) + 1
        weights[order[count:]] = 0
    return weights / weights.sum()


def expected(values: Array, seed: int, top_k: int = 0, top_p: float = 1.0, temperature: float = 1.0) -> list[int]:
    running = [np.cumsum(chances(row, top_k, top_p, temperature)) for row in values]
    return [int(np.argmax(sums > number)) for sums, number in zip(running, stream(seed, len(values)), strict=True)]


SETTINGS = [
    {"seed": 1},
    {"seed": 3, "top_k": 5, "temperature": 0.7},
    {"seed": 4, "top_p": 0.8, "temperature": 1.3},
    {"seed": 2**40 + 7, "top_k": 10, "top_p": 0.5},
]


@pytest.mark.parametrize("rows", [9, "rows"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_are_those_of_the_definition(device: Device, rows: int | str, settings: dict[str, Any]) -> None:
    """Whether the number of rows is known or not, each device draws the same tokens as float64 does."""
    values = logits(9)
    assert run(device, values, rows, **settings).tolist() == expected(values, **settings)


def test_many_seeds_agree_with_the_definition() -> None:
    """A thousand rows at once, more than one block of the generator each."""
    values = logits(1000, seed=5)
    assert run(Device.CPU, values, "rows", seed=77, top_p=0.9).tolist() == expected(values, 77, top_p=0.9)


def test_the_seed_0_stands_for_another_one() -> None:
    """A seed of 0 draws what 0xDEADBEEF draws."""
    values = logits(40)
    assert run(Device.CPU, values, 40, seed=0).tolist() == run(Device.CPU, values, 40, seed=0xDEADBEEF).tolist()


def test_the_same_seed_draws_the_same_in_every_run_and_other_seeds_do_not() -> None:
    """Sampling has no state."""
    g = Graph()
    x = g.input("x", ["rows", VOCABULARY])
    g.outputs = [g.sample(x, seed=11), g.sample(x, seed=12)]
    compiled = Session("cpu").compile(g)
    first, second = compiled.run({"x": logits(64)}), compiled.run({"x": logits(64)})
    assert first[0].tolist() == second[0].tolist()
    assert first[0].tolist() != first[1].tolist()


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_k": 1}])
def test_settings_that_leave_one_token_take_the_most_likely(device: Device, settings: dict[str, Any]) -> None:
    """No temperature, no probability and one token in play all mean ArgMax."""
    values = logits(6, seed=2)
    assert run(device, values, 6, seed=9, **settings).tolist() == values.argmax(-1).tolist()


def test_ties_with_the_last_token_in_play_stay() -> None:
    """With two equal second-best tokens, top_k=2 leaves three in play."""
    values = np.tile(np.asarray([0.0, 1.0, 2.0, 1.0, 0.5], np.float32), (300, 1))
    assert set(run(Device.CPU, values, 300, seed=1, top_k=2).tolist()) == {1, 2, 3}


def test_of_equal_tokens_top_p_takes_the_first(device: Device) -> None:
    """Four equal tokens and half of the probability leave the first two."""
    values = np.zeros((40, 4), np.float32)
    assert set(run(device, values, 40, seed=1, top_p=0.5).tolist()) == {0, 1}


def test_frequencies_follow_the_probabilities() -> None:
    """Over 20 000 draws each token comes as often as it should, within five standard deviations."""
    row, count = np.asarray([0.0, 1.0, -1.0, 2.0], np.float32), 20_000
    drawn = run(Device.CPU, np.tile(row, (count, 1)), "rows", seed=123, temperature=1.5)
    wanted = chances(row, 0, 1.0, 1.5)
    found = np.bincount(drawn, minlength=4) / count
    assert np.all(np.abs(found - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / count))


@pytest.mark.parametrize("dtype", ["i32", "i64", "u32", "f32"])
def test_one_row_without_a_batch_gives_a_scalar_of_the_asked_dtype(dtype: str) -> None:
    """Logits (V,) give one id."""
    values = logits(1)
    result = run(Device.CPU, values[0], 1, seed=21, dtype=dtype)
    assert result.shape == ()
    assert int(result) == expected(values, 21)[0]


def test_tokens_with_the_logit_minus_infinity_are_never_drawn() -> None:
    """A caller's mask holds."""
    values = np.where(np.arange(VOCABULARY) % 2, -np.inf, logits(200)).astype(np.float32)
    assert not np.any(run(Device.CPU, values, 200, seed=6, top_p=0.95) % 2)
