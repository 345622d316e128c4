"""Where a forward can be cut: the largest calls of the model's own in which nothing is met that a graph cannot record.

From the top of the call tree downwards: a method is taken where none of its calls has a reason against it and all that enters and
leaves it are tensors on the device; otherwise its callees are looked at. What is taken is then captured, each piece by the runtime,
and the whole compared with eager, bit for bit, on both probes. A piece that is refused or changes bits is replaced by its callees.
How pieces are captured and compared, ``trial`` knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from parity.judge.explain.calls import Call
from parity.judge.explain.tour import Tour
from parity.runtime.errors import ParityError

Cut = Callable[[Sequence[str]], tuple[str, dict[str, str]]]
"""Captures pieces together: the first difference from eager, empty where there is none, and the pieces that were not replayed as they
should, with the reason. May raise OutOfTime."""
HOLDS = "bits equal"
MOST_PIECES = 48
LEAST_SHARE = 0.02
LEAST_OPERATIONS = 4
_ROUNDS = 4


class OutOfTime(ParityError):
    """A trial took longer than it may. The message says how long that was."""


@dataclass(frozen=True)
class Piece:
    """``path``: as a Seam takes it. ``operations`` and ``seconds``: shares of the whole forward, 0 to 1, as seen in one traced call;
    ``calls``: how often one forward calls it."""

    path: str
    operations: float
    seconds: float
    calls: int


@dataclass(frozen=True)
class Proposal:
    """``model``: the class whose attributes the paths start from. ``pieces``, the first called first. ``proof``: what came of
    capturing them, ``bits equal`` where they hold. ``dropped``: pieces that did not hold, with the reason."""

    pieces: tuple[Piece, ...]
    model: str = ""
    proof: str = ""
    dropped: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.proof == HOLDS and bool(self.pieces)

    @property
    def operations(self) -> float:
        return sum(p.operations for p in self.pieces)

    @property
    def seconds(self) -> float:
        return sum(p.seconds for p in self.pieces)

    def code(self, eager: str) -> str:
        """The declaration, ready to paste. ``eager``: what stays outside and why."""
        paths = ", ".join(repr(p.path) for p in self.pieces) + ("," if len(self.pieces) == 1 else "")
        return f"Seam(pieces=({paths}), eager={eager!r})"


def propose(tour: Tour, lines: Collection[str] = (), refused: Collection[str] = (), *, training: bool = False) -> Proposal:
    """``lines``: of the model, at which a replay was seen to go wrong; ``refused``: pieces that did not hold. ``training``: shares are
    of the model's own calls, without the loss, and no piece is one that a step calls several times, since a training graph holds
    the activations of one call until its backward."""
    calls = list(tour.root.walk())
    repeated = {c.piece for c in calls if training and c.number > 1}
    bad = {c.piece for c in calls if c.unfit or c.reasons() or any(not c.lines.isdisjoint(lines) for c in c.walk())}
    bad |= {c.piece for c in calls if any(inner.piece in refused for inner in c.walk())} if refused else set()
    taken: dict[str, list[Call]] = {}
    waiting = list(tour.root.calls)
    while waiting:
        call = waiting.pop(0)
        if call.piece in bad or call.piece in repeated:
            waiting[:0] = call.calls
        elif call.operations:
            taken.setdefault(call.piece, []).append(call)
    whole = sum(c.operations for c in tour.root.calls) if training else tour.root.operations
    whole, time = whole or 1, sum(c.seconds for c in tour.root.calls) or 1.0
    pieces = [
        Piece(path, sum(c.operations for c in of) / whole, sum(c.seconds for c in of) / time, len(of)) for path, of in taken.items()
    ]
    pieces = [p for p in pieces if p.operations * whole >= LEAST_OPERATIONS * p.calls]
    shares: dict[str, float] = {}
    for piece in pieces:
        shares[_role(piece)] = shares.get(_role(piece), 0.0) + max(piece.operations, piece.seconds / 2)
    worth = [p for p in pieces if shares[_role(p)] >= LEAST_SHARE]
    kept = sorted(worth, key=lambda p: -p.operations)[:MOST_PIECES]
    return Proposal(tuple(p for p in pieces if p in kept), tour.model)


def _role(piece: Piece) -> str:
    """What a piece is called in every layer: many equal ones are worth a graph each where together they are worth one."""
    return re.sub(r"\d+", "*", piece.path)


def proven(again: Callable[[Collection[str]], Proposal], cut: Cut, wrong: Collection[str] = (), proof: str = HOLDS) -> Proposal:
    """The proposal that holds, found by capturing what is proposed and looking again where it fails. ``again``: proposes without the
    pieces that did not hold; ``wrong``: those known to before any trial; ``proof``: what it says of pieces that were replayed with no
    difference seen."""
    refused = set(wrong)
    dropped: list[str] = []
    proposal = again(refused)
    for _ in range(_ROUNDS):
        if not proposal.pieces:
            return Proposal((), proof="nothing is left to capture", dropped=tuple(dropped))
        paths = [p.path for p in proposal.pieces]
        try:
            different, failing = cut(paths)
        except OutOfTime as late:
            return replace(proposal, proof=f"not tried: {late}", dropped=tuple(dropped))
        if different and not failing:
            try:
                failing = _culprits(cut, paths, different)
            except OutOfTime as late:
                return Proposal((), proof=f"no cut held: together they replay other bits: {different}; {late}", dropped=tuple(dropped))
        if not failing:
            return replace(proposal, proof=proof, dropped=tuple(dropped))
        dropped += [f"{path or 'the model'}: {why}" for path, why in failing.items()]
        refused |= failing.keys()
        proposal = again(refused)
    return Proposal((), proof="no cut held", dropped=tuple(dropped))


def _culprits(cut: Cut, paths: Sequence[str], different: str) -> dict[str, str]:
    """Those of the pieces that make bits differ, with the reason, by halves; all of them where no half does alone."""
    if len(paths) == 1:
        return {paths[0]: f"replays other bits: {different}"}
    found: dict[str, str] = {}
    for half in (paths[: len(paths) // 2], paths[len(paths) // 2 :]):
        what, failing = cut(half)
        found |= failing or (_culprits(cut, half, what) if what else {})
    return found or dict.fromkeys(paths, f"replay other bits together: {different}")
