"""Where a replay first leaves eager's bits: faults planted in a known submodule are found there. And the hash that finds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parity.judge.explain.divergence import Divergence, first_divergence, hashed
from parity.judge.subject import Bench
from parity.rows.family import Input
from parity.runtime.engine import engine
from parity.runtime.errors import CaptureRefused

from .judging import ENGINE, catalogue_of, subject

pytestmark = pytest.mark.usefixtures("one_thread")


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


class Counts(Plain):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x + self.calls)


class Feeds(nn.Module):
    """A fault of its own before its only, healthy child is called."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.calls = Plain(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.child(x * self.calls)


class Caches(nn.Module):
    """A table of one entry, renewed by another size."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.table = -1, torch.zeros(0)

    def lookup(self, x: Tensor) -> Tensor:
        if self.size != x.shape[0]:
            self.size, self.table = x.shape[0], torch.arange(x.shape[0], device=x.device)[:, None] + 1.0
        return self.table

    def forward(self, x: Tensor) -> Tensor:
        return x * self.lookup(x)


class Helped(Caches):
    """The same with the table made by a method of its own, which a filled cache does not call."""

    def make(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[0], device=x.device)[:, None] + 1.0

    def lookup(self, x: Tensor) -> Tensor:
        if self.size != x.shape[0]:
            self.size, self.table = x.shape[0], self.make(x)
        return self.table


def diverges(build: Any) -> Divergence | None:
    catalogue = catalogue_of(lambda s: subject(build()), lambda size, batch: (Input((size, 4)),), sizes=(3,), other_size=5)
    row = catalogue.zoos[0].families[0].rows()[0]
    bench = Bench(row, catalogue.family(row), engine(ENGINE), 0)
    with bench.engine.entered(), torch.no_grad():
        return first_divergence(bench)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_planted_fault_is_found_in_its_submodule(place: int) -> None:
    def build() -> nn.Module:
        layers: list[nn.Module] = [Plain() for _ in range(3)]
        layers[place] = Counts()
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(*layers), nn.Linear(4, 4))

    found = diverges(build)
    assert found is not None
    assert (found.module, found.operation) == (f"1.{place}", "aten::add")
    assert "super().forward(x + self.calls)" in found.where


def test_a_fault_before_a_child_is_its_parents() -> None:
    found = diverges(lambda: nn.Sequential(nn.Linear(4, 4), Feeds()))
    assert found is not None
    assert (found.piece, found.module, found.operation) == ("1.child.inner", "1", "aten::mul")


@pytest.mark.parametrize(
    ("build", "operation", "line"), [(Caches, "aten::arange", "self.size, self.table ="), (Helped, "", "def lookup")]
)
def test_what_is_kept_from_an_earlier_call_is_found_at_the_method_that_returns_it(build: Any, operation: str, line: str) -> None:
    found = diverges(lambda: nn.Sequential(nn.Linear(4, 4), build()))
    assert found is not None
    assert (found.call, found.piece, found.operation) == (5, "1.lookup", operation)
    assert line in found.where


@pytest.mark.parametrize("build", [Plain, lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5).train())])
def test_a_healthy_model_does_not_diverge(build: Any) -> None:
    assert diverges(build) is None


def test_an_intermediate_that_nothing_depends_on_is_told_too() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Counts()

        def forward(self, x: Tensor) -> Tensor:
            self.inner(x)
            return x.neg()

    found = diverges(Unused)
    assert found is not None
    assert found.module == "inner"


def test_a_forward_that_cannot_be_captured_is_refused() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.sum())

    with pytest.raises(CaptureRefused):
        diverges(Reads)


# ---------------------------------------------------------------- the hash
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def drawn(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(size=st.integers(2, 60), seed=st.integers(0, 999), place=st.integers(0, 59))
@settings(max_examples=25, deadline=None)
def test_one_changed_element_always_shows(dtype: torch.dtype, size: int, seed: int, place: int) -> None:
    x = drawn(dtype, (size,), seed)
    y = x.clone()
    raw = y.view(torch.uint8) if dtype != torch.bool else y
    width = raw.numel() // size
    at = (place % size) * width
    raw[at] = ~raw[at] if dtype == torch.bool else raw[at] ^ 1
    assert hashed(x).item() != hashed(y).item()
    assert hashed(x).item() == hashed(x.clone()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float16], ids=str)
@given(size=st.integers(2, 60), seed=st.integers(0, 999), first=st.integers(0, 59), second=st.integers(0, 59))
@settings(max_examples=50, deadline=None)
def test_elements_that_changed_places_show(dtype: torch.dtype, size: int, seed: int, first: int, second: int) -> None:
    x = drawn(dtype, (size,), seed)
    y = x.clone()
    a, b = first % size, second % size
    y[[a, b]] = x[[b, a]]
    assert (hashed(x).item() == hashed(y).item()) == bool((x == y).all())


def test_what_torch_calls_equal_is_told_apart() -> None:
    zero = torch.zeros(3)
    assert hashed(zero).item() != hashed(-zero).item()
    nan = torch.full((3,), float("nan"))
    other = nan.clone()
    other.view(torch.int32)[1] += 1
    assert hashed(nan).item() == hashed(nan.clone()).item()
    assert hashed(nan).item() != hashed(other).item()


def test_negating_any_two_elements_shows() -> None:
    """The worst case of the docstring: differences that are multiples of 2**31 leave 33 bits to differ in."""
    x = torch.rand(40) + 1
    seen = {hashed(x).item()}
    pairs = [(a, b) for a in range(40) for b in range(a)]
    for a, b in pairs:
        y = x.clone()
        y[[a, b]] *= -1
        seen.add(hashed(y).item())
    assert len(seen) == len(pairs) + 1


def test_views_hash_as_what_they_show() -> None:
    x = torch.rand(4, 6)
    assert hashed(x.t()).item() == hashed(x.t().contiguous()).item() != hashed(x).item()
    assert hashed(torch.zeros(0)).item() == 0


def test_what_was_derived_from_weights_and_kept_is_found() -> None:
    class Folds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.folded, self.version = nn.Linear(4, 4), torch.zeros(0), -1

        def fold(self) -> Tensor:
            if self.version != self.inner.weight._version:  # eager notices; a replay does not
                self.version, self.folded = self.inner.weight._version, self.inner.weight.t() * 2
            return self.folded

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.fold()

    found = diverges(lambda: nn.Sequential(nn.Linear(4, 4), Folds()))
    assert found is not None
    assert (found.probe, found.piece) == ("weights", "1.fold")


# ---------------------------------------------------------------- noise
def test_where_eager_does_not_repeat_itself_nothing_is_said_of_the_replay() -> None:
    """State that outlives a build stands for a kernel's noise, which this device has none of."""
    calls: list[int] = []

    class Noisy(Plain):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x) * len(calls)

    found = diverges(lambda: nn.Sequential(nn.Linear(4, 4), Noisy()))
    assert found is not None
    assert (found.noisy, found.piece, found.operation) == (True, "1", "")
