"""Where an arm's tensors lie beside eager's: pure functions over patterns and distances. Statistics inform; they lift no verdict."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from parity.judge.train.quorum import Varying

KINDS: Final = ("exact", "inside_set", "inside_spread", "outside")
LEVEL: Final = 0.05


def p_value(distances: Sequence[Sequence[float]], eager: int) -> float:
    """The exact permutation test of whether the first ``eager`` runs and the rest come from one distribution.

    The statistic is twice the mean distance between the groups minus the mean distances within each (the energy distance:
    Székely and Rizzo, 2004); the p-value is the share of all ways to choose the first group in which it is as large as observed.
    """
    count = len(distances)

    def statistic(first: Iterable[int]) -> float:
        mine = set(first)
        theirs = [i for i in range(count) if i not in mine]
        between = [distances[i][j] for i in sorted(mine) for j in theirs]
        return 2 * _mean(between) - _within(distances, sorted(mine)) - _within(distances, theirs)

    observed = statistic(range(eager))
    slack = 1e-9 * abs(observed)  # the same distances, added in another order
    every = [statistic(chosen) for chosen in itertools.combinations(range(count), eager)]
    return sum(value >= observed - slack for value in every) / len(every)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _within(distances: Sequence[Sequence[float]], group: list[int]) -> float:
    """Over all ordered pairs, a run and itself included: the biased estimate, which is never negative."""
    return _mean([distances[i][j] for i in group for j in group])


def kind_of(tensor: Varying) -> str:
    """One of KINDS. ``exact`` needs eager to agree with itself."""
    seen = set(tensor.eager)
    if set(tensor.arm) <= seen:
        return "exact" if len(seen) == 1 else "inside_set"
    if len(seen) > 1 and tensor.formed_alike and p_value(tensor.distances, len(tensor.eager)) > LEVEL:
        return "inside_spread"
    return "outside"


def joint_p_value(tensors: Sequence[Varying]) -> float | None:
    """One test over all tensors that vary, distances added up; None where there is nothing to test."""
    told = [t for t in tensors if t.formed_alike and t.arm]
    if not told:
        return None
    count = len(told[0].distances)
    total = [[sum(t.distances[i][j] for t in told) for j in range(count)] for i in range(count)]
    return p_value(total, len(told[0].eager))
