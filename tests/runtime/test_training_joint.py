"""Backwards that a replay would not give as eager does: through several forwards at once, or with hooks on what lies within."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity.runtime import training
from parity.runtime.emulated import device

from .steps import Body, Log, both, images, state, update


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with device():
        yield
    torch.set_num_threads(threads)


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.turn, self.head = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.turn(torch.tanh(self.stem(x.mean((2, 3)))))))
        return out


class Thrice(Once):
    """One weight at three depths."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x.mean((2, 3))))
        for _ in range(3):
            h = torch.tanh(self.turn(h)) + h
        out: Tensor = self.head(h)
        return out


def pairs(together: Callable[[int], bool], *, apart: bool = False, amp: bool = False) -> Body:
    """Steps of one forward, or of three ``together``, whose backward is one, or ``apart``."""

    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        logs = []
        for i in range(9):
            owner.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                losses = [net(images(i) * k).float().square().mean() for k in range(1, 4 if together(i) else 2)]
            if apart:
                for loss in losses:
                    loss.backward()
            else:
                torch.stack(losses).sum().backward()
            logs.append(state(owner))
            update(owner)
        return logs

    return body


def always(i: int) -> bool:
    return True


@pytest.mark.parametrize(("kind", "amp"), [(Thrice, False), (Thrice, True), (Once, True)])
def test_forwards_of_one_backward_are_eager_where_a_replay_would_add_otherwise(
    kind: type[nn.Module], amp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    different, graphs, lines = both(kind, pairs(always, amp=amp))
    assert different == []
    assert graphs.replays == 0
    assert len(lines) == 1
    assert "one backward goes through several of its forwards" in lines[0]
    monkeypatch.setattr(training, "unplayable", lambda steps, replayed: {})
    different, graphs, _ = both(kind, pairs(always, amp=amp))
    assert graphs.replays
    assert different


def test_a_weight_used_once_is_as_well_replayed() -> None:
    different, graphs, lines = both(Once, pairs(always))
    assert (different, lines) == ([], [])
    assert graphs.replays


def test_backwards_of_their_own_are_as_well_replayed() -> None:
    different, graphs, lines = both(Thrice, pairs(always, apart=True))
    assert (different, lines) == ([], [])
    assert graphs.replays


def test_what_begins_after_the_capture_is_said_and_happens_once() -> None:
    """The first such step cannot be known before its backward."""
    different, graphs, lines = both(Thrice, pairs(lambda i: i in (5, 7)))
    assert {d.split(": ")[0] for d in different} <= {"step 5", "step 6", "step 7", "step 8"}
    assert different[0].startswith("step 5: grad:turn")
    assert len(lines) == 1
    assert graphs.replays == 3


def test_a_backward_after_a_release_is_counted_for_nobody() -> None:
    def body(net: Any, owner: nn.Module) -> list[Log]:
        logs = pairs(lambda i: False)(net, owner)
        owner.zero_grad()
        loss = net(images(20)).square().mean()
        if hasattr(net, "release"):
            net.release()
        loss.backward()
        return [*logs, state(owner)]

    different, _, lines = both(Thrice, body)
    assert (different, lines) == ([], [])


# ---------------------------------------------------------------- hooks on outputs
class Features(Once):
    def forward(self, x: Tensor) -> Any:
        features = torch.tanh(self.stem(x.mean((2, 3))))
        return self.head(torch.tanh(self.turn(features))), features


def hooking(how: str, start: int = 0) -> Body:
    def body(net: Any, owner: nn.Module) -> list[Log]:
        logs = []
        for i in range(9):
            owner.zero_grad(set_to_none=True)
            out, features = net(images(i))
            seen: list[Tensor] = []
            if how == "kept":
                features.retain_grad()
            elif how == "heard":
                features.register_hook(lambda g, seen=seen: seen.append(g.clone()))
            elif how == "changed":
                features.register_hook(lambda g: g * 0.5)
            elif how == "last":
                out.register_hook(lambda g: g * 0.5)
            (out.square().mean() + features.square().mean()).backward()
            logs.append([*((f"heard {k}", g) for k, g in enumerate([features.grad] if how == "kept" else seen)), *state(owner)])
            update(owner)
        return logs

    return body


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", ["kept", "heard", "changed"])
def test_who_listens_within_the_network_is_given_all_of_it(how: str) -> None:
    different, graphs, lines = both(Features, hooking(how))
    assert different == []
    assert graphs.captures == 0
    assert len(lines) == 1
    assert "hears all gradients of an output from which others come" in lines[0]


@pytest.mark.parametrize("how", ["last", "none"])
def test_a_hook_on_what_nothing_comes_from_is_called_at_each_step(how: str) -> None:
    different, graphs, lines = both(Features, hooking(how))
    assert (different, lines) == ([], [])
    assert graphs.replays >= 5
