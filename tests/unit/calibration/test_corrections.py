"""Corrections: what whole graphs say about classes of work, and the error that is left."""

from __future__ import annotations

import pytest

from rlx_ort.calibration.corrections import LEAST_ERROR, class_of, error_of, fit
from rlx_ort.calibration.profile import Reference


def graphs(factor: float, count: int, **terms: float) -> list[Reference]:
    """Return graphs whose product terms take `factor` times as long as their rows say, the others as long."""
    shapes = [{name: ns * (1 + at) for name, ns in terms.items()} for at in range(count)]
    return [
        Reference(f"g{at}", sum(ns * (factor if name == "product" else 1.0) for name, ns in shape.items()), 0.0, shape)
        for at, shape in enumerate(shapes)
    ]


def test_graphs_that_agree_with_their_rows_need_no_correction() -> None:
    """Every factor is 1 and the error the least that is ever said."""
    found = fit(graphs(1.0, 8, product=1000.0, overhead=100.0))
    assert found.corrections == {"product": pytest.approx(1.0)}
    assert found.errors["product"] < 0.2


def test_a_class_that_takes_longer_everywhere_is_corrected() -> None:
    """Eight graphs of products that take 1.5 times as long, against four that say nothing is wrong."""
    found = fit(graphs(1.5, 8, product=1000.0))
    assert found.corrections["product"] == pytest.approx(1.5 ** (8 / 12), rel=0.02)


def test_a_correction_is_bounded() -> None:
    """Ten times as long is not believed: a factor is at most 2.5."""
    assert fit(graphs(10.0, 40, product=1000.0)).corrections["product"] == pytest.approx(2.5)


def test_the_round_trip_is_never_corrected() -> None:
    """It was measured by itself."""
    assert "overhead" not in fit(graphs(1.3, 8, product=1000.0, overhead=1000.0)).corrections


def test_the_class_at_fault_is_corrected_and_the_other_is_not() -> None:
    """Graphs of both kinds tell which of the two takes longer."""
    products = graphs(1.5, 6, product=1000.0)
    elements = graphs(1.5, 6, elements=1000.0)
    both = graphs(1.5, 6, product=700.0, elements=300.0)
    found = fit([*products, *elements, *both])
    assert 1.5**0.65 < found.corrections["product"] < 1.5  # held towards 1 by as much as four graphs
    assert found.corrections["elements"] == pytest.approx(1.0, rel=0.05)


def test_graphs_that_disagree_make_the_error_larger() -> None:
    """Half of them twice as fast, half twice as slow: no factor helps, and the error says so."""
    split = [*graphs(2.0, 6, product=1000.0), *graphs(0.5, 6, product=1000.0)]
    found = fit(split)
    assert found.corrections["product"] == pytest.approx(1.0, rel=0.1)
    assert found.errors["product"] > 0.7


def test_too_few_graphs_say_nothing() -> None:
    """Two graphs correct nothing."""
    assert fit(graphs(2.0, 2, product=1000.0)) == ({}, {})


def test_the_error_of_a_sum_is_that_of_its_parts_by_share() -> None:
    """Three quarters at 0.2 and one quarter at 0.6 make 0.3; a class without an error counts as the rest does."""
    terms = {"product": 300.0, "rows": 100.0}
    assert error_of(terms, {"product": 0.2, "rows": 0.6}, 1.0) == pytest.approx(0.3)
    assert error_of(terms, {"product": 0.2}, 1.0) == pytest.approx(0.4)
    assert error_of({}, {}, 0.35) == 0.35


def test_no_error_is_said_to_be_smaller_than_the_least() -> None:
    """However well a few graphs fit."""
    assert all(error >= LEAST_ERROR for error in fit(graphs(1.0, 60, product=1000.0)).errors.values())


def test_classes_of_work() -> None:
    """Formulas and operators have classes; what is not listed moves elements."""
    assert [class_of(kind) for kind in ("gemm", "depthwise", "Softmax", "Gather", "Tanh")] == [
        "product",
        "convolution",
        "rows",
        "copies",
        "elements",
    ]
