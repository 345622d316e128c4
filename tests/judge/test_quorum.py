"""Sets of bit patterns and distances between runs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parity.judge.bits import bundle
from parity.judge.train.quorum import distances, numbered, varying


def test_patterns_are_numbered_in_order_of_appearance() -> None:
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    assert numbered([b, a, b.clone(), a, torch.tensor([3.0])]) == (0, 1, 0, 1, 2)


def test_patterns_are_bits_not_values() -> None:
    assert numbered([torch.tensor([0.0]), torch.tensor([-0.0])]) == (0, 1)
    assert numbered([torch.tensor([math.nan]), torch.tensor([math.nan])]) == (0, 0)


def test_distances_are_relative_to_the_largest_norm() -> None:
    found = distances([torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])])
    assert found[0][0] == 0.0
    assert found[0][1] == found[1][0] == pytest.approx(0.5 / math.hypot(3, 4.5))


@pytest.mark.parametrize("other", [None, torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_what_has_no_common_form_is_infinitely_far(other: Tensor | None) -> None:
    assert distances([torch.zeros(2), other, torch.zeros(2)])[0] == (0.0, math.inf, 0.0)


def test_infinities_count_where_one_side_has_them() -> None:
    some = torch.tensor([math.inf, 1.0])
    assert distances([some, some.clone(), torch.tensor([0.0, 1.0])])[0] == (0.0, 0.0, 1.0)


def test_integers_and_complex_numbers_have_distances_too() -> None:
    assert distances([torch.tensor([4]), torch.tensor([2])])[0][1] == 0.5
    assert distances([torch.tensor([2j]), torch.tensor([1j])])[0][1] == 0.5


def test_only_what_varies_is_told() -> None:
    def run(value: float) -> object:
        return bundle([("same", torch.ones(2)), ("moves", torch.tensor([value]))])

    (found,) = varying([run(1.0), run(2.0)], [run(2.0), run(3.0)])
    assert (found.path, found.eager, found.arm, found.noisy) == ("moves", (0, 1), (1, 2), True)
    assert found.formed_alike
    assert found.apart is not None
    assert found.apart.path == "moves"
    assert varying([run(1.0)] * 2, [run(1.0)]) == []


def test_a_missing_gradient_is_not_one_of_zeros() -> None:
    (found,) = varying([bundle([("g", None)])], [bundle([("g", torch.zeros(2))])])
    assert not found.formed_alike
    assert not found.noisy
    assert found.apart is not None
    assert "expected NoneType" in str(found.apart)


def test_a_leaf_that_a_run_lacks_is_told() -> None:
    (found,) = varying([bundle([("a", torch.ones(1))])], [bundle([("a", torch.ones(1)), ("b", torch.ones(1))])])
    assert (found.path, found.formed_alike) == ("b", False)


def test_whole_numbers_are_known_as_such() -> None:
    told = {t.path: t.counts for t in varying([bundle([("n", torch.tensor(1)), ("x", torch.tensor(1.0))])],
                                              [bundle([("n", torch.tensor(2)), ("x", torch.tensor(2.0))])])}  # fmt: skip
    assert told == {"n": True, "x": False}


@given(
    runs=st.lists(
        st.tuples(
            st.lists(st.sampled_from([0.0, -0.0, 1.0, math.nan]), min_size=3, max_size=3),
            st.lists(st.integers(0, 1), min_size=2, max_size=2),
        ),
        min_size=2,
        max_size=6,
    )
)
def test_comparing_runs_whole_finds_what_comparing_leaf_by_leaf_finds(runs: list[tuple[list[float], list[int]]]) -> None:
    made = [bundle([("x", torch.tensor(x)), ("none", torch.zeros(0)), ("n", torch.tensor(n)), ("what", "text")]) for x, n in runs]
    expected = {path: numbered([dict(run.leaves())[path] for run in made]) for path in made[0].paths}
    found = {t.path: t.eager for t in varying(made, [], measured=False)}
    assert found == {path: numbers for path, numbers in expected.items() if len(set(numbers)) > 1}
    assert [run.apart(made[0]) for run in made] == [[n[i] != n[0] for n in expected.values()] for i in range(len(made))]
