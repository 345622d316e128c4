"""Seams: what is captured is captured, the rest is the model's own Python, and the composed output equals eager."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from parity.runtime import Seam, seams
from parity.runtime.emulated import device
from parity.runtime.invalidation import LOCAL
from parity.runtime.state import same_bits


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with device(), torch.no_grad():
        torch.manual_seed(0)
        yield


class Matting(nn.Module):
    """As BiRefNet: an encoder method that can be captured, a decoder that reads a value and cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.deep = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.out = nn.Conv2d(4, 1, 1)
        self.steps: list[str] = []

    def forward_enc(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.steps.append("encoder")
        y = self.stem(x)
        return y, {"deep": self.deep(y)}

    def forward(self, x: Tensor) -> Tensor:
        y, more = self.forward_enc(x)
        self.steps.append("decoder")
        if float(more["deep"].mean()) > 10:
            return self.out(y)
        return self.out(y + more["deep"])


class Reads(nn.Module):
    """As PP-OCR: detection at the page's size, recognition of crops whose widths vary."""

    def __init__(self) -> None:
        super().__init__()
        self.detection = nn.Conv2d(3, 1, 3, padding=1)
        self.recognition = nn.Linear(4, 5)

    def forward(self, page: Tensor, widths: list[int]) -> list[Tensor]:
        score = self.detection(page).flatten()
        return [self.recognition(score[: 4 * w].reshape(w, 4)) for w in widths]


def image(size: int = 8) -> Tensor:
    return torch.randn(1, 3, size, size, device="cuda")


def test_an_encoder_method_is_captured_and_the_decoder_runs() -> None:
    model = Matting().to("cuda").eval()
    seam = Seam(("forward_enc",), eager="the decoder reads a value").bind(model)
    with seam.scope():
        model(image())
        model.steps.clear()
        results = [(x, model(x)) for x in (image(), image(), image())]
        assert model.steps == ["decoder"] * 3
    assert all(same_bits(y, model(x)) for x, y in results)
    assert seam.runners["forward_enc"].info().replays == 4


def test_without_the_seam_this_model_cannot_be_captured() -> None:
    model = Matting().to("cuda").eval()
    seam = Seam().bind(model)
    with seam.scope():
        x = image()
        assert same_bits(model(x), model(x))
    assert any("host-sync" in reason for reason in seam.runners[""].info().eager)


def test_one_graph_per_page_size_under_the_cap() -> None:
    model = Reads().to("cuda").eval()
    seam = Seam(("detection",), max_graphs=2, eager="recognition: crop widths vary").bind(model)
    for size, widths in ((8, [3, 1]), (12, [2]), (8, [5]), (16, [1, 2, 3]), (12, []), (16, [4])):
        x = image(size)
        with seam.scope():
            found = model(x, widths)
        expected = model(x, widths)
        assert len(found) == len(expected)
        assert all(map(same_bits, found, expected))
    info = seam.runners["detection"].info()
    assert info.captures == 2
    assert info.replays == 4
    assert info.eager == {"more than 2 signatures": 2}


def test_several_pieces_share_one_pool() -> None:
    model = Matting().to("cuda").eval()
    seam = Seam(("stem", "deep.0", "out")).bind(model)
    with seam.scope():
        for x in (image(), image(), image(12)):
            found = model(x)
            assert same_bits(found, reference(model, x))
    assert [r.info().captures for r in seam.runners.values()] == [2, 2, 2]
    assert len({id(e.pool) for r in seam.runners.values() for e in r.entries()}) == 1


def reference(model: Matting, x: Tensor) -> Tensor:
    plain = Matting().to("cuda").eval()
    plain.load_state_dict(model.state_dict())
    return plain(x)


def test_outside_a_scope_and_in_other_threads_the_model_is_as_it_was() -> None:
    model = Reads().to("cuda").eval()
    seam = Seam(("detection",)).bind(model)
    assert "forward" not in vars(model.detection)
    with seam.scope():
        assert "forward" in vars(model.detection)
        active: list[bool] = []
        thread = threading.Thread(target=lambda: active.append(seam.active()))
        thread.start()
        thread.join()
        assert active == [False]
        with seam.scope(after=0):
            model(image(), [1])
        assert seam.runners["detection"].info().captures == 0
        with pytest.raises(ZeroDivisionError), seam.scope():
            raise ZeroDivisionError
        assert "forward" in vars(model.detection)
    assert "forward" not in vars(model.detection)
    copy.deepcopy(model)


def test_a_capture_at_the_third_call() -> None:
    model = Reads().to("cuda").eval()
    seam = Seam(("detection",)).bind(model)
    with seam.scope(after=3):
        for _ in range(4):
            model(image(), [1])
    info = seam.runners["detection"].info()
    assert (info.captures, info.replays, info.eager.total()) == (1, 2, 2)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Seam(()), ValueError, "give a tuple of paths"),
        (lambda: Seam("encoder"), ValueError, "give a tuple of paths"),  # type: ignore[arg-type]
        (lambda: Seam(("a", "a")), ValueError, "twice"),
        (lambda: Seam(max_graphs=0), ValueError, "at least one graph"),
        (lambda: Seam(("nowhere",)).bind(nn.Linear(1, 1)), AttributeError, "nowhere"),
        (lambda: Seam().bind(object()), TypeError, "name one of its methods"),
    ],
)
def test_a_seam_that_cannot_be_is_refused(make: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()  # type: ignore[operator]


def test_a_copy_made_within_a_scope_is_a_model_of_its_own() -> None:
    model = Reads().to("cuda").eval()
    seam = Seam(("recognition",)).bind(model)
    with seam.scope():
        model(image(), [1])
        twin = copy.deepcopy(model)
        pickle.dumps(model)
    twin.recognition.weight.mul_(2)
    x = torch.randn(2, 4, device="cuda")
    assert same_bits(twin.recognition(x), torch.nn.functional.linear(x, twin.recognition.weight, twin.recognition.bias))


def _another_module(model: Reads) -> None:
    model.recognition = nn.Linear(4, 5).to("cuda")


def _another_forward(model: Reads) -> None:
    before = model.recognition.forward
    model.recognition.forward = lambda x: before(x) * 0  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [_another_module, _another_forward])
def test_what_stands_in_the_place_of_a_piece_is_captured_instead(change: Callable[[Reads], None]) -> None:
    model, page = Reads().to("cuda").eval(), image()
    seam = Seam(("recognition",)).bind(model)
    with seam.scope():
        model(page, [1])
    old = weakref.ref(model.recognition) if change is _another_module else None
    change(model)
    expected = model(page, [1])
    for _ in range(2):
        with seam.scope():
            assert same_bits(model(page, [1])[0], expected[0])
    assert seam.runners["recognition"].info().replays == 2
    gc.collect()
    assert old is None or old() is None


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem: nn.Module = nn.Linear(4, 4)
        self.head: nn.Module | None = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x if self.head is None else self.head(x)


def test_an_error_while_a_piece_is_exchanged_does_not_look_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)).to("cuda"), torch.ones(2, 4, device="cuda")
    seam = Seam(("0",)).bind(model)
    model[0] = nn.Linear(4, 2).to("cuda")
    with monkeypatch.context() as patch:
        patch.setattr(seams, "GraphRunner", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError), seam.scope():
            pass
    with seam.scope():
        model(x)
    assert seam.runners["0"].info().replays == 1


def test_a_piece_that_is_taken_away_stays_away() -> None:
    model, x = Optional().to("cuda"), torch.ones(2, 4, device="cuda")
    seam = Seam(("stem", "head")).bind(model)
    with seam.scope():
        model(x)
    model.head = None
    with seam.scope():
        assert same_bits(model(x), model.stem(x))
    assert "head" not in vars(model)


def test_a_forward_that_is_made_anew_for_each_look_is_captured_once() -> None:
    class Scaled(nn.Linear):
        def _scaled(self, factor: float, x: Tensor) -> Tensor:
            return super().forward(x) * factor

        forward = functools.partialmethod(_scaled, 2.0)  # type: ignore[assignment]

    model, x = nn.Sequential(Scaled(4, 4)).to("cuda"), torch.ones(2, 4, device="cuda")
    seam = Seam(("0",)).bind(model)
    for _ in range(3):
        with seam.scope():
            model(x)
    assert (seam.runners["0"].info().captures, seam.runners["0"].info().replays) == (1, 3)


def test_scopes_that_end_in_another_order_leave_nothing_behind() -> None:
    """As two videos do that are read in turns, each a generator suspended within its scope."""
    seam = Seam(("detection",)).bind(Reads().to("cuda").eval())

    def steps(after: int) -> Iterator[None]:
        with seam.scope(after):
            yield

    first, second = steps(3), steps(1)
    for one in (first, second):
        next(one)
    for one in (first, second):
        one.close()  # type: ignore[attr-defined]
    assert not seam.active()
    assert (LOCAL.visit, LOCAL.after) == (0, 1)
