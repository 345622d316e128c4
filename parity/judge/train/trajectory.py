"""Several optimizer steps in a row, as a trainer takes them: what adds up over steps, and what a graph must notice in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from parity.judge.bits import Bundle, Difference, bundle
from parity.judge.counterfactual.conditions import EagerTwist
from parity.judge.train.step import Forward, TrainBench, forward_and_backward, streams
from parity.rows.training import TrainSubject
from parity.runtime.state import unlike


@dataclass(frozen=True)
class Micro:
    """One forward and backward. ``update``: an optimizer step follows. ``change``: before it, what the network computes changes, or
    may have."""

    probe: str
    variant: str = ""
    update: bool = True
    change: bool = False


SCRIPT: Final = (
    Micro("A", update=False),
    Micro("B"),  # two batches add up
    Micro("A"),
    Micro("B", "odd"),  # the short last batch of an epoch
    Micro("A", change=True),
    Micro("B", "size", update=False),
    Micro("A"),
    Micro("B"),
)
"""Six optimizer steps, more where no gradients add up. A variant that does not exist is the row's own shape."""
LEARNING_RATE: Final = 1e-3
CLIP: Final = 1.0
DECAY: Final = 0.9


@dataclass(frozen=True)
class Travelled:
    """``losses``: of each forward; ``final``: parameters, buffers, averages, the scaler's factor and the generators at the end;
    ``replayed``: of each forward, whether it was; ``rewritten``: whether a loss changed after it had been handed out."""

    losses: Bundle
    final: Bundle
    finite: bool
    replayed: tuple[bool, ...]
    rewritten: bool = False

    def unlike(self, other: Travelled) -> list[Difference]:
        return [*self.losses.unlike(other.losses), *self.final.unlike(other.final)]


class _Optimizers:
    """AdamW for every second parameter, SGD with momentum for the others, so that the state of both is at stake."""

    def __init__(self, module: nn.Module, half: bool) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        even, odd = self.parameters[::2], self.parameters[1::2]
        self._each: list[torch.optim.Optimizer] = [torch.optim.AdamW(even, lr=LEARNING_RATE, weight_decay=0.01)]
        if odd:
            self._each.append(torch.optim.SGD(odd, lr=LEARNING_RATE, momentum=0.9))
        self.scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2, enabled=half)

    def update(self) -> None:
        held = [o for o in self._each if any(p.grad is not None for group in o.param_groups for p in group["params"])]
        for optimizer in held:
            self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        for optimizer in held:
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self._each:
            optimizer.zero_grad(set_to_none=True)


def travel(
    bench: TrainBench,
    subject: TrainSubject,
    call: Callable[..., Any],
    *,
    cache: bool,
    twist: EagerTwist,
    changed: Callable[[], None],
    replays: Callable[[], int],
    replayed: Sequence[bool] = (),
) -> Travelled:
    """Walks SCRIPT from the saved state, weights moving. ``changed``: told after the subject's ``switch``, in the middle; ``replays``:
    how many there were so far; ``replayed``: of each forward, whether an arm replayed it, so that eager does as a capture does only
    there. What the subject is afterwards is not what it was."""
    half = bench.dtype == torch.float16
    optimizers = _Optimizers(subject.module, half)
    average = [t.detach().clone() for t in subject.module.state_dict().values() if t.is_floating_point()]
    losses: list[tuple[str, Any]] = []
    seen: list[bool] = []
    at_once: list[Tensor] = []
    for number, micro in enumerate(SCRIPT):
        if micro.change:
            if subject.switch is not None:
                subject.switch()
            changed()
        batch = bench.args(micro.probe, micro.variant if bench.variant(micro.variant) else "")
        here = twist if not replayed or replayed[number] else EagerTwist()
        before = replays()
        forward = Forward(bench, call, here, keep=False)
        loss = forward_and_backward(bench, subject, forward, batch, cache, optimizers.scaler.scale)
        seen.append(replays() > before)
        losses.append((f"loss {number + 1}", loss))
        with bench.engine.quiet():
            at_once.append(loss.clone())
        if micro.update or bench.family.accumulate == 1:
            optimizers.update()
            _averaged(average, subject.module)
    torch.cuda.synchronize()
    final: list[tuple[str, Any]] = [
        *((f"parameter {name}", p.detach()) for name, p in subject.module.named_parameters()),
        *((f"buffer {name}", b) for name, b in subject.module.named_buffers()),
        *((f"average {i}", t) for i, t in enumerate(average)),
        ("scale", optimizers.scaler.get_scale()),
        *streams(subject.module),
    ]
    with bench.engine.quiet(), torch.no_grad():
        finite = all(bool(x.isfinite().all()) for _, x in losses)
        rewritten = any(unlike([x for _, x in losses], at_once))
        return Travelled(bundle(losses), bundle(final), finite, tuple(seen), rewritten)


def _averaged(average: list[Tensor], module: nn.Module) -> None:
    """An exponential moving average of weights and statistics, as trainers keep it."""
    now = [t for t in module.state_dict().values() if t.is_floating_point()]
    with torch.no_grad():
        for mine, theirs in zip(average, now, strict=True):
            mine.mul_(DECAY).add_(theirs, alpha=1 - DECAY)
