"""Steps of training run twice, with graphs and without, and what differs between the two runs in any bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.runtime import TrainGraphs
from parity.runtime.state import same_bits

Log = list[tuple[str, Tensor | None]]


class Small(nn.Module):
    """What a step may move: weights, running statistics, the random stream. One parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.2)
        self.box, self.score = nn.Linear(8, 4), nn.Linear(8, 3)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.drop(torch.relu(self.norm(self.conv(x)))).mean((2, 3))
        return {"box": self.box(x), "score": self.score(x)}


def objective(out: dict[str, Tensor]) -> Tensor:
    return out["box"].square().mean() + F.cross_entropy(out["score"].float(), torch.arange(len(out["score"]), device="cuda") % 3)


def fresh(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    random.seed(seed)
    return kind().to("cuda").train()


def images(i: int, batch: int = 4, size: int = 8) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(i)).to("cuda")


def state(net: nn.Module) -> Log:
    generator = torch.cuda.default_generators[0].get_state()
    return [
        *((f"grad:{n}", None if p.grad is None else p.grad.clone()) for n, p in net.named_parameters()),
        *((f"param:{n}", p.detach().clone()) for n, p in net.named_parameters()),
        *((f"buffer:{n}", b.clone()) for n, b in net.named_buffers()),
        ("generator", generator),
    ]


def differing(actual: list[Log], expected: list[Log]) -> list[str]:
    assert [[n for n, _ in log] for log in actual] == [[n for n, _ in log] for log in expected]
    return [
        f"step {i}: {name}"
        for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True))
        for (name, a), (_, b) in zip(mine, theirs, strict=True)
        if (a is None) != (b is None) or (a is not None and b is not None and not same_bits(a, b))
    ]


Body = Callable[[Callable[..., Any], nn.Module], list[Log]]


def both(kind: Callable[[], nn.Module], body: Body, **options: Any) -> tuple[list[str], TrainGraphs, list[str]]:
    """What differs between a run with graphs and one without, the graphs, and what they logged."""
    lines: list[str] = []
    net = fresh(kind)
    torch.manual_seed(1)
    expected = body(net, net)
    net = fresh(kind)
    graphs = TrainGraphs(net, log=lines.append, **options)
    torch.manual_seed(1)
    return differing(body(graphs, net), expected), graphs, lines


def plainly(net: Callable[..., Any], owner: nn.Module, steps: int = 8, clear: bool = True, start: int = 0) -> list[Log]:
    """Forward, backward and a bare update, from batch to batch."""
    logs = []
    for i in range(start, start + steps):
        if clear:
            owner.zero_grad(set_to_none=True)
        out = net(images(i))
        loss = objective(out)
        loss.backward()
        logs.append([("loss", loss.detach().clone()), *((f"out:{k}", v.detach().clone()) for k, v in out.items()), *state(owner)])
        update(owner)
    return logs


def update(owner: nn.Module) -> None:
    with torch.no_grad():
        for p in owner.parameters():
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.05)


def trajectory(make: Callable[[Any], torch.optim.Optimizer], every: int, set_to_none: bool, amp: bool) -> Body:
    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        optimizer, average, logs = make(owner.parameters()), copy.deepcopy(owner).eval(), []
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        batches = [(4, 8)] * 6 + [(3, 8)] + [(4, 8)] * 2 + [(4, 12)] * 8 + [(4, 8)] * 4
        for i, (batch, size) in enumerate(batches):
            if i == 13 and isinstance(net, TrainGraphs):
                net.invalidate("a change midway")
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
                loss = objective(net(images(i, batch, size))) / every
            loss.backward()
            logs.append([("loss", loss.detach().clone()), *state(owner)])
            if (i + 1) % every == 0:
                nn.utils.clip_grad_norm_(owner.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
                with torch.no_grad():
                    for mine, theirs in zip(average.state_dict().values(), owner.state_dict().values(), strict=True):
                        if mine.is_floating_point():
                            mine.mul_(0.9).add_(theirs, alpha=0.1)
                schedule.step()
                logs.append([(f"average:{k}", v.clone()) for k, v in average.state_dict().items()])
        with torch.no_grad():
            logs.append([("average", average(images(99))["box"])])
        return logs

    return body
