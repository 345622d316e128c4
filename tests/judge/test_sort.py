"""Where an arm lies beside eager: sorting and the permutation test, over patterns and distances alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.judge.bits import bundle
from parity.judge.train.quorum import Varying, distances, varying
from parity.judge.train.sort import LEVEL, joint_p_value, kind_of, p_value


def tensor(eager: list[float], arm: list[float]) -> Varying:
    (found,) = varying([bundle([("t", torch.tensor([x]))]) for x in eager], [bundle([("t", torch.tensor([x]))]) for x in arm])
    return found


@pytest.mark.parametrize(
    ("eager", "arm", "kind"),
    [
        ([1.0] * 4, [2.0] * 3, "outside"),
        ([1.0, 1.0, 1.5, 1.0], [1.0] * 3, "inside_set"),
        ([1.0, 1.1, 1.2, 1.3], [1.05, 1.15, 1.25], "inside_spread"),
        ([1.0, 1.1, 1.2, 1.3], [7.0, 7.1, 7.2], "outside"),
        ([1.0, 1.0, 1.5, 1.0], [1.0, 1.5, 1.2], "inside_spread"),
    ],
)
def test_kinds(eager: list[float], arm: list[float], kind: str) -> None:
    assert kind_of(tensor(eager, arm)) == kind


def test_one_pattern_of_eager_has_no_spread_to_lie_in() -> None:
    assert kind_of(tensor([1.0] * 4, [1.0, 1.0, math.nextafter(1.0, 2) * 1.0000002])) == "outside"


def test_the_smallest_p_value_of_four_and_three_is_one_in_thirty_five() -> None:
    found = distances([torch.tensor([x]) for x in (1.0, 1.1, 1.2, 1.3, 9.0, 9.1, 9.2)])
    assert p_value(found, 4) == pytest.approx(1 / 35)
    assert LEVEL > 1 / 35


@given(st.lists(st.integers(0, 30), min_size=4, max_size=7), st.integers(1, 3))
def test_the_test_is_exact(values: list[int], eager: int) -> None:
    """Over all ways to deal the runs out, p-values at most t come up in a share of at most t."""
    count = len(values)
    apart = distances([torch.tensor([float(v)]) for v in values])
    found = []
    for chosen in itertools.combinations(range(count), eager):
        order = [*chosen, *(i for i in range(count) if i not in chosen)]
        found.append(p_value([[apart[i][j] for j in order] for i in order], eager))
    for t in found:
        assert sum(p <= t for p in found) / len(found) <= t + 1e-9


def test_one_test_over_all_tensors() -> None:
    inside = tensor([1.0, 1.1, 1.2, 1.3], [1.05, 1.15, 1.25])
    outside = tensor([1.0, 1.1, 1.2, 1.3], [7.0, 7.1, 7.2])
    assert joint_p_value([]) is None
    near, far = joint_p_value([inside]), joint_p_value([inside, outside])
    assert near is not None
    assert far is not None
    assert far <= LEVEL < near


def test_what_is_formed_otherwise_takes_no_part_in_the_test() -> None:
    (missing,) = varying([bundle([("g", None)])] * 2, [bundle([("g", torch.zeros(1))])])
    assert joint_p_value([missing]) is None
    assert kind_of(missing) == "outside"
