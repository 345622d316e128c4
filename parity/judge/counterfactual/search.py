"""The search for the smallest set of conditions under which two arms agree bit for bit, and what class that set proves. No tensors.

Settings of the process only take noise away, so they are added one by one. What is asked of the eager arm imitates one kind of capture
and makes it differ from another: those are tried alone, and in every combination once all settings hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from parity.judge.counterfactual.conditions import Condition

CLASSES: Final = ("exact", "one_ulp", "eager_noise", "float_rounding", "own_rng")
UNCOUNTED: Final = -1
"""Differing tensors of a trial that only said that it differs."""
_NOISE: Final = frozenset({"nondeterministic-kernel", "reduction-order"})


@dataclass(frozen=True)
class Trial:
    """``conditions``: in the order of the table. ``differing``: how many tensors differ under them; 0 where the arms agree."""

    conditions: tuple[str, ...]
    differing: int


@dataclass(frozen=True)
class Proof:
    """``conditions``: a set under which the arms agree; empty if they agree as they are. ``causes``: what it names, without repetition.
    ``minimal``: that no single condition can be left out was tried, and the arms differed each time."""

    conditions: tuple[str, ...]
    causes: tuple[str, ...]
    minimal: bool


@dataclass(frozen=True)
class Search:
    """``proof`` is None where none was found. ``tried``: every trial, in order. ``cut``: the budget ended it."""

    proof: Proof | None
    tried: tuple[Trial, ...]
    cut: bool


class _OverBudget(Exception):
    pass


class _Trials:
    """Asks once per set."""

    def __init__(self, agree: Callable[[frozenset[str]], bool | int], budget: int, stop: Callable[[], bool]) -> None:
        self.agree, self.budget, self.stop = agree, budget, stop
        self.known: dict[frozenset[str], Trial] = {}

    def __call__(self, conditions: Sequence[Condition]) -> bool:
        names = frozenset(c.name for c in conditions)
        if names not in self.known:
            if len(self.known) >= self.budget or (self.known and self.stop()):
                raise _OverBudget
            answer = self.agree(names)
            if isinstance(answer, bool):
                differing = 0 if answer else UNCOUNTED
            elif (differing := answer) < 0:
                raise ValueError(f"{answer} tensors cannot differ, as was said under {', '.join(sorted(names)) or 'no condition'}")
            self.known[names] = Trial(tuple(c.name for c in _ordered(conditions)), differing)
        return self.known[names].differing == 0


def _ordered(conditions: Iterable[Condition]) -> list[Condition]:
    return sorted(conditions, key=lambda c: (c.cost, c.name))


def _candidates(conditions: Sequence[Condition], whole: bool) -> Iterator[list[Condition]]:
    """The sets to try, cheapest first: none; each twist of the eager arm alone; the settings, one more each time, but all of them first
    if ``whole``; all settings with every combination of twists, the smallest first; each remaining condition alone."""
    everything = _ordered(conditions)
    twists = [c for c in everything if c.kind == "eager"]
    settings = [c for c in everything if c.kind != "eager"]
    yield []
    for one in twists:
        yield [one]
    if whole:
        yield settings
    for n in range(len(settings)):
        yield settings[: n + 1]
    for size in range(1, len(twists) + 1):
        for some in itertools.combinations(twists, size):
            yield [*settings, *some]
    for one in settings[1:]:
        yield [one]


def search(
    agree: Callable[[frozenset[str]], bool | int],
    conditions: Sequence[Condition],
    *,
    budget: int,
    stop: Callable[[], bool] = lambda: False,
    whole: bool = False,
) -> Search:
    """``agree(names)`` compares the arms under conditions: the number of tensors that differ, or only whether they agree.

    ``budget``: calls of ``agree`` at most; ``stop``: asked before each further call, for a budget of time; ``whole``: try all settings
    at once before fewer, which is faster where an answer costs the same whether they agree or not. The set found agrees; where
    nothing cut the search, none of its conditions can be left out. Deterministic. Raises ValueError for a budget below one, since even
    ``exact`` takes a comparison, and for a negative count.
    """
    if budget < 1:
        raise ValueError(f"budget={budget}: one comparison at least is needed")
    ask = _Trials(agree, budget, stop)
    found: list[Condition] | None = None
    minimal = False
    try:
        found = next((_ordered(some) for some in _candidates(conditions, whole) if ask(some)), None)
        step = len(found or ()) // 2  # halves first: of many settings few are needed
        while found and step:
            before = len(found)
            for part in [found[max(0, end - step) : end] for end in range(before, 0, -step)]:  # dearest first
                if ask(shorter := [c for c in found if c not in part]):
                    found = shorter
            step = step // 2 if step > 1 else int(len(found) < before)
        minimal = found is not None
        cut = False
    except _OverBudget:
        cut = True
    proof = None
    if found is not None:
        proof = Proof(tuple(c.name for c in found), tuple(dict.fromkeys(c.cause for c in found)), minimal)
    return Search(proof, tuple(ask.known.values()), cut)


def class_of(proof: Proof | None, *, eager_is_stable: bool, max_ulp: int, rng_alignable: bool = True) -> tuple[str, str]:
    """(class, cause) of a training row, from its proof; two empty strings where nothing is proved.

    ``eager_is_stable``: eager runs agree among each other under no condition. ``max_ulp``: the largest distance between the arms under
    no condition; negative where ULPs mean nothing. ``rng_alignable``: whether both arms can be made to start from one generator state.
    A row that needs only the aligned generator is exact, and says that it was the generator.
    """
    if proof is None:
        return ("", "") if rng_alignable else ("own_rng", "rng")
    near = "one_ulp" if 0 <= max_ulp <= 1 else "float_rounding"
    if _NOISE & set(proof.causes):
        return (near, "reduction-order") if eager_is_stable else ("eager_noise", "nondeterministic-kernel")
    twists = [cause for cause in proof.causes if cause != "rng"]
    if twists:
        return near, twists[0]
    return "exact", "rng" if proof.causes else ""
