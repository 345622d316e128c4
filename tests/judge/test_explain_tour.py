"""All that one forward does and a graph cannot record, at once: causes, lines, submodules, counts. And what a look leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity.judge.explain.calls import Calls, replaced, unfit
from parity.judge.explain.streams import StreamWatch
from parity.judge.explain.tour import Tour, tour
from parity.runtime.engine import DEVICE, engine
from parity.runtime.errors import CaptureRefused

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def entered() -> Iterator[None]:
    with engine("emulated").entered(), torch.no_grad():
        yield


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.sum())


class Uploads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tensor(1.0, device=x.device)
        return x + torch.ones(4).to(x.device)


class Chooses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x[x > 0].mean()


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.own = self.own or torch.Generator(x.device)
        return x + torch.rand(4, device=x.device, generator=self.own)


class Forgets(nn.Module):
    """Work on a side stream that nobody joins; ``joins``: that never waited either."""

    def __init__(self, waits: bool) -> None:
        super().__init__()
        self.waits = waits

    def forward(self, x: Tensor) -> Tensor:
        side = torch.cuda.Stream()
        if self.waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.sum()
        return x.tanh()


class Seeds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x + torch.rand_like(x)


class Joins(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        side, event = torch.cuda.Stream(), torch.cuda.Event()
        event.record()
        side.wait_event(event)
        with torch.cuda.stream(side):
            y = x.sum()
        torch.cuda.current_stream().wait_event(side.record_event())
        return x * y


def looked(module: nn.Module, *, certifies: bool = False) -> Tour:
    module = module.to(DEVICE).eval()
    return tour(module, (torch.rand(2, 4).to(DEVICE),), module, certifies=certifies)


def told(found: Tour) -> list[tuple[str, str]]:
    return [(r.cause, r.module) for r in found.reasons]


def test_every_reason_is_met_in_one_pass() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Reads(), nn.Sequential(Uploads(), Reads()), Chooses(), Draws(), Forgets(waits=True))
    found = looked(module)
    assert told(found) == [
        ("host-sync", "1"), ("h2d-copy", "2.0"), ("h2d-copy", "2.0"), ("data-dependent-shape", "3"), ("rng", "4"), ("side-stream", ""),
    ]  # fmt: skip
    assert [r.count for r in found.reasons] == [2, 1, 1, 1, 1, 1], "one line, met in two submodules, is one reason"
    assert all("test_explain_tour.py:" in r.where for r in found.reasons), "the model's own lines, not torch's"
    assert found.error == ""


@pytest.mark.parametrize("module", [nn.Linear(4, 4), Joins(), nn.Dropout(0.5), nn.Sequential(nn.LayerNorm(4), nn.GELU())])
@pytest.mark.parametrize("certifies", [False, True])
def test_a_healthy_forward_has_no_reason(module: nn.Module, certifies: bool) -> None:
    assert looked(module, certifies=certifies).reasons == ()


@pytest.mark.parametrize(("waits", "words"), [(True, "never waited for"), (False, "never joined")])
@pytest.mark.parametrize("certifies", [False, True])
def test_streams_that_a_capture_would_lose(waits: bool, words: str, certifies: bool) -> None:
    (reason,) = looked(Forgets(waits), certifies=certifies).reasons
    assert reason.cause == "side-stream"
    assert words in reason.what
    assert "x.sum()" in reason.where


@pytest.mark.parametrize(
    ("module", "causes"),
    [
        (Reads(), ["host-sync"]),
        (Chooses(), ["data-dependent-shape"]),
        (Seeds(), ["rng"]),
        (nn.Sequential(Reads(), Chooses()), ["host-sync", "data-dependent-shape"]),
    ],
    ids=["reads", "chooses", "seeds", "both"],
)
def test_the_passive_look_of_a_device_tells_the_same(module: nn.Module, causes: list[str]) -> None:
    seen = looked(module, certifies=True)
    assert [r.cause for r in seen.reasons] == causes
    assert [(r.cause, r.where) for r in seen.reasons] == [(r.cause, r.where) for r in looked(module).reasons]


def test_a_wait_that_no_mode_sees_is_seen() -> None:
    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.cuda.synchronize()
            return x.neg()

    before = torch.cuda.synchronize
    assert [r.cause for r in looked(Waits(), certifies=True).reasons] == ["host-sync"]
    assert torch.cuda.synchronize is before, "what was watched is as it was"


def test_a_look_leaves_nothing_behind() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), Uploads()).to(DEVICE).train()
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    state = torch.cuda.get_rng_state().tolist()
    tour(module, (torch.rand(2, 4).to(DEVICE),), module, certifies=False)
    assert torch.cuda.get_rng_state().tolist() == state
    assert all(torch.equal(b, buffers[n]) for n, b in module.named_buffers())
    graph, x = torch.cuda.CUDAGraph(), torch.rand(2, 4).to(DEVICE)
    with torch.cuda.graph(graph):
        y = x * 2
    graph.replay()
    assert torch.equal(y, x * 2), "the device captures as before"


def test_a_capture_that_collects_ends_without_a_graph() -> None:
    graph: Any = torch.cuda.CUDAGraph()
    met: list[CaptureRefused] = []
    graph.collect = met.append
    x = torch.rand(4).to(DEVICE)
    with torch.cuda.graph(graph):
        assert x.sum().item() == pytest.approx(float(sum(x.tolist())))
    assert [r.cause for r in met] == ["host-sync", "host-sync"]
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def test_what_stops_the_forward_is_told() -> None:
    class Stops(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x.sum().item(), x.numpy()

    found = looked(Stops())
    assert [r.cause for r in found.reasons] == ["host-sync", "d2h-copy"]
    assert found.error.startswith("TypeError: can't convert cuda")


def test_an_operation_known_for_a_wrong_stream_names_its_kernel() -> None:
    deform = pytest.importorskip("torchvision.ops").DeformConv2d(2, 2, 3)

    class Deforms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = deform

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x, torch.zeros(1, 18, 4, 4, device=x.device))

    module = Deforms().to(DEVICE)
    for certifies in (False, True):
        found = tour(module, (torch.rand(1, 2, 6, 6).to(DEVICE),), module, certifies=certifies)
        (reason,) = found.reasons
        assert "deformable_im2col_kernel" in reason.what
        assert "self.conv(x" in reason.where, "the model's line, not that of torchvision's operator"
        assert found.unseen == ("torchvision::deform_conv2d",)


# ---------------------------------------------------------------- the call tree
class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def encode(self, x: Tensor) -> Tensor:
        return self.stem(x).relu()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.head(self.encode(x))}


def test_methods_and_submodules_are_calls() -> None:
    module = Cut().to(DEVICE)
    found = tour(module, (torch.rand(2, 4).to(DEVICE),), module, certifies=False)
    assert [(c.piece, c.module, c.operations) for c in found.root.walk()] == [
        ("", "", 3), ("", "", 3), ("encode", "", 2), ("stem", "stem", 1), ("head", "head", 1),
    ]  # fmt: skip
    assert found.root.calls[0].calls[0].chain == (("", 0), ("", 1), ("encode", 1))


def test_an_exception_does_not_unbalance_the_tree() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = nn.Linear(3, 3), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.bad(x)
            except RuntimeError:
                return self.good(x)

    module = Tries().to(DEVICE)
    calls = Calls(module)
    with calls:
        module(torch.rand(2, 4).to(DEVICE))
    assert [(c.piece, len(c.calls)) for c in calls.root.walk()] == [("", 1), ("", 2), ("bad", 0), ("good", 0)]
    assert calls.top is calls.root


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x, ""),
        (lambda x: {"a": [x, 1, None]}, ""),
        (lambda x: x.cpu(), "not on the device"),
        (lambda x: 3, "no tensor"),
        (lambda x: (x, object()), "holds a object"),
    ],
)
def test_what_can_cross_the_border_of_a_graph(make: Callable[[Tensor], Any], words: str) -> None:
    found = unfit(make(torch.rand(2).to(DEVICE)), "it")
    assert (words in found) if words else found == ""


def test_the_profiler_is_as_it_was() -> None:
    import sys

    before = sys.getprofile()
    with pytest.raises(ZeroDivisionError), Calls(nn.Linear(1, 1)):
        1 / 0  # noqa: B018
    assert sys.getprofile() is before


def test_a_replaced_attribute_comes_back() -> None:
    class Owner:
        here = 1

    with replaced(Owner, "here", 2), replaced(Owner, "gone", 3):
        assert (Owner.here, Owner.gone) == (2, 3)
    assert Owner.here == 1
    assert not hasattr(Owner, "gone")


def test_work_after_a_join_is_unjoined_again() -> None:
    met: list[CaptureRefused] = []
    watch = StreamWatch(met.append)
    with watch.entered():
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            watch.launch("first", "a.py:1")
        main.wait_stream(side)
        with torch.cuda.stream(side):
            watch.launch("second", "a.py:2")
    assert [(r.cause, r.where) for r in met] == [("side-stream", "a.py:2")]
