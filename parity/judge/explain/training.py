"""What can be learned of a training step without judging it: what its network does that a graph cannot record, and where it could
be cut.

The network, forward and backward, is what is captured, and its reasons are the row's. Loss and targets stay eager; the whole
forward with them is looked at only to see which parts of the model could be captured apart."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parity.judge.explain.calls import Reason
from parity.judge.explain.seams import Proposal, propose
from parity.judge.explain.tour import Tour, tour
from parity.judge.explain.trial import proven_in_steps
from parity.judge.subject import BrokenRow, blamed, seed_everything
from parity.judge.train.step import TrainBench, mixed, unusable
from parity.rows.training import TrainSubject
from parity.runtime import tree
from parity.runtime.liveness import held_tensors


def look(bench: TrainBench) -> tuple[Tour, list[Reason], Proposal]:
    """A look at the network's forward and backward, reasons that outlive a step, and a cut of the whole forward, tried. Gradients are
    enabled by the caller. Raises BrokenRow."""
    inner, kept, whole, varying = _looked(bench)
    if not whole.reasons:
        return inner, kept, Proposal(())

    def again(refused: Collection[str]) -> Proposal:
        return propose(whole, refused=refused, training=True)

    return inner, kept, proven_in_steps(bench, again, varying)


def _looked(bench: TrainBench) -> tuple[Tour, list[Reason], Tour, set[str]]:
    """The network's tour, reasons that outlive a step, the whole forward's tour, and the pieces whose shapes follow the batch."""
    subject = bench.build()
    given: list[tuple[Any, ...]] = []

    def network(*args: Any) -> Any:
        given.append(args)
        return subject.network(*args)

    seed_everything(bench.seed)
    with bench.around():
        for _ in range(2):  # what is built lazily is built
            with blamed(lambda: "a training step"), mixed(bench.dtype, True):
                loss = subject.loss(network, *bench.args("A"))
            if problem := unusable(loss):
                raise BrokenRow(problem)
            loss.backward()
            subject.module.zero_grad(set_to_none=True)
            del loss
        kept = _kept_graphs(subject)
        inner = tour(
            lambda *args: _both_ways(bench, subject, args), tree.leafed(given[-1]), subject.network, certifies=bench.engine.certifies
        )
        subject.module.zero_grad(set_to_none=True)
        whole, other = (
            tour(lambda *batch: _forward(bench, subject, batch), bench.args(probe), subject.module, certifies=bench.engine.certifies)
            for probe in "AB"
        )
    varying = {piece for piece, _ in _shapes(whole).items() ^ _shapes(other).items()}
    inner = replace(inner, reasons=tuple(_placed(subject, reason) for reason in inner.reasons))
    return inner, kept, whole, varying


def _placed(subject: TrainSubject, reason: Reason) -> Reason:
    """With the path of the submodule in the model, which its author knows, where the network is a wrapper around it."""
    owner = subject.network.get_submodule(reason.module)
    return replace(reason, module=next((name for name, m in subject.module.named_modules() if m is owner), reason.module))


def _shapes(whole: Tour) -> dict[str, tuple[Any, ...]]:
    """What each piece is called with. Where that follows the targets, as the queries of a DETR's decoder do, every batch would need a
    graph of its own."""
    found: dict[str, tuple[Any, ...]] = {}
    for call in whole.root.walk():
        found[call.piece] = (*found.get(call.piece, ()), call.shapes)
    return found


def _both_ways(bench: TrainBench, subject: TrainSubject, args: tuple[Any, ...]) -> Any:
    with mixed(bench.dtype, False):
        result = subject.network(*args)
    roots = [x for x in tree.flatten(result)[0] if isinstance(x, Tensor) and x.requires_grad]
    torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
    return result


def _forward(bench: TrainBench, subject: TrainSubject, batch: tuple[Any, ...]) -> Any:
    with mixed(bench.dtype, False):
        return subject.loss(subject.network, *batch)


def _kept_graphs(subject: TrainSubject) -> list[Reason]:
    """Tensors that the model keeps with the autograd graph of a step that is over: the graph's nodes for parameters belong to the
    stream of that step, and a capture that reuses them depends on it."""
    held = [(path, t) for path, t in [*held_tensors(subject.module), *subject.module.named_buffers()] if t.grad_fn is not None]
    return [
        Reason("side-stream", f"{path} keeps the autograd graph of an earlier step", "", path.rpartition(".")[0]) for path, _ in held
    ]
