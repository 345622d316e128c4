"""Copies as nodes of a graph: their order, their addresses, what happens where CUDA does not take them. On graphs that are
played, over the memory of host tensors; test_nodes_on_cuda.py has CUDA's own."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.runtime import nodes
from parity.runtime.buffers import Intake, Outlet
from parity.runtime.cudart import CudaError, Unfit
from parity.runtime.nodes import EXECUTABLES, Copies
from parity.runtime.record import _elsewhere
from parity.runtime.state import same_bits

from .played import ILLEGAL_ADDRESS, INVALID, OUT_OF_MEMORY, Exec, Graph, Runtime, entry_of, runtime

__all__ = ["runtime"]


def several(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return x * 2, (x + y).t(), torch.empty(0, 3), (y > 0), y.double().sum(), 7


def drawn(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(4, 4), torch.randn(4, 4)]


def equal(found: Any, expected: Any) -> bool:
    return all(same_bits(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("numbered", [False, True])
def test_results_are_those_of_the_region_and_stay(runtime: Runtime, numbered: bool) -> None:
    entry = entry_of(runtime, drawn(0), several, numbered=numbered)
    assert entry.copies is not None
    assert entry.copies.takes
    assert entry.copies.gives
    calls = [drawn(seed) for seed in range(20)]
    held = [entry.replay(leaves) for leaves in calls]
    for leaves, result in zip(calls, held, strict=True):
        assert equal(result, several(*leaves))
        assert [x.stride() for x in result[:-1]] == [x.stride() for x in several(*leaves)[:-1]]
    places = [x.untyped_storage().data_ptr() for result in held for x in result[:-1] if x.numel()]
    assert len(set(places)) == len(places)
    assert not any(x._is_view() for result in held for x in result[:-1])


def test_a_result_alone_comes_out_alone(runtime: Runtime) -> None:
    entry = entry_of(runtime, drawn(0), lambda x, y: x @ y)
    leaves = drawn(1)
    assert same_bits(entry.replay(leaves), leaves[0] @ leaves[1])


@pytest.mark.parametrize("lost", ["before", "behind"])
def test_without_their_edges_copies_come_at_the_wrong_time(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    if lost == "before":
        monkeypatch.setattr(runtime, "depend", lambda *_: None)
        monkeypatch.setattr(Exec, "launch", functools.partialmethod(Exec.launch, min))
    else:
        monkeypatch.setattr(runtime, "ends", lambda graph: [])
    entry = entry_of(runtime, drawn(0), several)
    assert not equal(entry.replay(drawn(1)), several(*drawn(1)))


def test_an_order_from_the_eldest_is_as_good_while_the_edges_are_there(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exec, "launch", functools.partialmethod(Exec.launch, min))
    entry = entry_of(runtime, drawn(0), several)
    assert equal(entry.replay(drawn(1)), several(*drawn(1)))


def test_an_address_is_told_once(runtime: Runtime) -> None:
    entry = entry_of(runtime, drawn(0), lambda x, y: x + y)
    leaves = drawn(1)
    held = [entry.replay(leaves)]
    before = runtime.told
    held += [entry.replay(leaves) for _ in range(3)]  # all are held: each lies elsewhere
    assert runtime.told == before + 3  # results only
    held.append(entry.replay([leaves[0].clone(), leaves[1]]))
    assert runtime.told == before + 3 + 2


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Where the next results go, one after the other, over and over."""
    given: list[Tensor] = []

    def place(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        given.append(given.pop(0))
        return given[-1]

    monkeypatch.setattr(nodes, "_empty", lambda: place)
    return given


@pytest.mark.parametrize(("count", "told"), [(1, 0), (2, 0), (EXECUTABLES, 0), (EXECUTABLES + 1, 12)])
def test_executable_graphs_know_one_place_each(runtime: Runtime, places: list[Tensor], count: int, told: int) -> None:
    places += [torch.empty(4, 4) for _ in range(count)]
    entry = entry_of(runtime, drawn(0), lambda x, y: x + y, numbered=True)
    inputs = drawn(1)
    for _ in range(2 * count):
        entry.replay(inputs)
    before = runtime.told
    for _ in range(12):
        inputs[0].add_(1)
        assert same_bits(entry.replay(inputs), inputs[0] + inputs[1])
    assert runtime.told - before == told
    assert len(runtime.launches) == 12 + 2 * count
    assert len({id(e) for e in runtime.launches}) == min(count, EXECUTABLES)
    graph: Any = entry.graph
    assert graph.replays == 0


def test_each_of_two_reads_where_the_input_lies_now(runtime: Runtime, places: list[Tensor]) -> None:
    places += [torch.empty(4, 4), torch.empty(4, 4)]
    entry = entry_of(runtime, drawn(0), lambda x, y: x - y, numbered=True)
    x, y = drawn(2)
    for turn in range(9):
        leaves = [x.clone(), y] if turn % 3 else [x, y.clone()]
        assert same_bits(entry.replay(leaves), x - y)


def test_one_that_is_told_nothing_writes_elsewhere(runtime: Runtime, places: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the two above."""
    places += [torch.empty(4, 4), torch.empty(4, 4)]
    entry = entry_of(runtime, drawn(0), lambda x, y: x - y, numbered=True)
    copies: Any = entry.copies
    entry.replay(drawn(1))
    monkeypatch.setattr(copies, "aim", lambda addresses: copies._next)
    assert not same_bits(entry.replay(drawn(2)), drawn(2)[0] - drawn(2)[1])


def test_inputs_in_two_places_are_known_where_results_are_not_copied(runtime: Runtime) -> None:
    entry = entry_of(runtime, drawn(0), lambda x, y: x * y, clone=False, numbered=True)
    calls = [drawn(1), drawn(2)]
    for leaves in calls * 2:
        entry.replay(leaves)
    before = runtime.told
    for leaves in calls * 3:
        assert same_bits(entry.replay(leaves), leaves[0] * leaves[1])
    assert runtime.told == before


def test_a_region_that_draws_is_replayed_by_torch(runtime: Runtime, places: list[Tensor]) -> None:
    places += [torch.empty(4, 4), torch.empty(4, 4)]
    entry = entry_of(runtime, drawn(0), lambda x, y: x + y, numbered=False)
    for _ in range(4):
        entry.replay(drawn(1))
    graph: Any = entry.graph
    assert (graph.replays, runtime.launches) == (4, [])


def test_another_is_made_with_memory_of_its_call(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the graph was captured with may be unmapped by then, and CUDA looks at it."""
    entry = entry_of(runtime, drawn(0), lambda x, y: x + y, numbered=True)
    plain, seen = runtime.instantiate, []
    copied = lambda graph: [step[:2] for step in graph.work.values() if isinstance(step, tuple)]  # noqa: E731
    monkeypatch.setattr(runtime, "instantiate", lambda graph: (seen.append(copied(graph)), plain(graph))[1])
    for seed in range(1, EXECUTABLES):
        leaves = drawn(seed)
        result = entry.replay(leaves)
        given = {leaves[0].data_ptr(), leaves[1].data_ptr(), result.data_ptr()}
        assert [len(given & set(ends)) for ends in seen.pop()] == [1, 1, 1]  # the other end is the graph's own
    assert not seen


def test_no_room_for_a_second_leaves_one(runtime: Runtime, places: list[Tensor]) -> None:
    places += [torch.empty(4, 4), torch.empty(4, 4)]
    entry = entry_of(runtime, drawn(0), lambda x, y: x + y, numbered=True)
    leaves = drawn(1)
    runtime.refuse = [OUT_OF_MEMORY]
    for _ in range(4):
        assert same_bits(entry.replay(leaves), leaves[0] + leaves[1])
    assert len({id(e) for e in runtime.launches}) == 1
    assert not runtime.refuse
    assert entry.copies is not None


def test_further_ones_end_with_their_entry(runtime: Runtime, places: list[Tensor]) -> None:
    places += [torch.empty(4, 4), torch.empty(4, 4)]
    entry = entry_of(runtime, drawn(0), lambda x, y: x + y, numbered=True)
    for _ in range(3):
        entry.replay(drawn(1))
    copies, graph = entry.copies, entry.graph
    assert copies is not None
    further = set(map(id, copies._told)) - {id(graph.exec)}  # which torch ends
    assert further
    assert runtime.ended == []
    del entry, copies
    gc.collect()
    assert set(map(id, runtime.ended)) == further


def test_an_input_given_twice_and_one_passed_on(runtime: Runtime) -> None:
    x, y = drawn(0)
    entry = entry_of(runtime, [x, x, y], lambda a, b, c: (a, a + b + c, c))
    one, other = drawn(1)
    result = entry.replay([one, one, other])
    assert result[0] is one
    assert result[2] is other
    assert same_bits(result[1], one + one + other)


def test_arguments_that_are_no_tensors(runtime: Runtime) -> None:
    entry = entry_of(runtime, [3, *drawn(0)], lambda n, x, y: x * n + y)
    leaves = [3, *drawn(1)]
    assert same_bits(entry.replay(leaves), leaves[1] * 3 + leaves[2])


@pytest.mark.parametrize(
    ("change", "takes", "gives"),
    [
        (lambda x: x, True, True),
        (lambda x: x[:, ::2], False, True),
        (lambda x: x[:1].expand(4, 4), False, True),
        (lambda x: x[:0], False, True),
        (lambda x: x.t(), True, True),
    ],
)
def test_odd_inputs_are_copied_beside_the_graph(runtime: Runtime, change: Callable[[Tensor], Tensor], takes: bool, gives: bool) -> None:
    entry = entry_of(runtime, [change(drawn(0)[0])], lambda x: (x + 1, torch.ones(2)))
    assert entry.copies is not None
    assert (bool(entry.copies.positions), entry.copies.gives) == (takes, gives)
    x = change(drawn(1)[0])
    assert equal(entry.replay([x]), (x + 1, torch.ones(2)))


@pytest.mark.parametrize(
    "odd",
    [
        lambda x: torch.nn.Parameter(x),
        lambda x: x.clone().requires_grad_(),
    ],
)
def test_odd_results_are_cloned(odd: Callable[[Tensor], Tensor]) -> None:
    x = drawn(0)[0]
    assert Outlet([x, x + 1], [], True).pieces(set())
    assert not Outlet([x, odd(x)], [], True).pieces(set())


def test_results_that_others_own_are_cloned() -> None:
    """Whoever owns one may give it other memory, which the graph would not follow and a clone does."""
    cache = torch.ones(3)
    intake = Intake([torch.ones(3)])
    (x,) = intake.leaves
    known = _elsewhere([cache, cache.view(3, 1), x + 1, x.view(3, 1)], intake)
    assert Outlet([x + 1, x.view(3, 1)], intake.leaves, True).pieces(known)
    assert not Outlet([x + 1, cache.view(1, 3)], intake.leaves, True).pieces(known)


def test_without_clones_only_inputs_are_nodes(runtime: Runtime) -> None:
    entry = entry_of(runtime, drawn(0), lambda x, y: x + y, clone=False)
    assert entry.copies is not None
    assert entry.copies.takes
    assert not entry.copies.gives
    first = entry.replay(drawn(1))
    assert same_bits(first, sum(drawn(1)))  # type: ignore[arg-type]
    assert entry.replay(drawn(2)) is first


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("numbered", [False, True])
def test_memory_that_cuda_does_not_take_goes_beside_the_graph_for_good(runtime: Runtime, which: int, numbered: bool) -> None:
    entry = entry_of(runtime, drawn(0), lambda x, y: (x + y, x - y), numbered=numbered)
    graph: Any = entry.graph
    copies: Any = entry.copies
    held = entry.replay(drawn(0))
    copies._spare = 0
    runtime.refuse = [0] * which + [INVALID]
    assert equal(entry.replay(drawn(1)), (sum(drawn(1)), drawn(1)[0] - drawn(1)[1]))
    assert entry.copies is None
    assert runtime.forgotten == 1  # else torch would take the error for its own
    assert entry.pool.settled == 1  # type: ignore[attr-defined]
    assert not any(isinstance(step, tuple) for step in graph.exec.work.values())
    assert equal(entry.replay(drawn(2)), (sum(drawn(2)), drawn(2)[0] - drawn(2)[1]))
    assert equal(held, (sum(drawn(0)), drawn(0)[0] - drawn(0)[1]))
    assert len(runtime.ended) == numbered  # the one that was made
    assert not entry.pool.lock.locked()  # type: ignore[attr-defined]


def test_any_other_error_is_raised_in_cudas_words(runtime: Runtime) -> None:
    entry = entry_of(runtime, drawn(0), lambda x, y: x + y)
    runtime.refuse = [ILLEGAL_ADDRESS]
    with pytest.raises(CudaError, match="where an input lies: CUDA error 700: said by CUDA") as caught:
        entry.replay(drawn(1))
    assert not isinstance(caught.value, Unfit)
    assert same_bits(entry.replay(drawn(2)), sum(drawn(2)))  # type: ignore[arg-type]  # what was not told is told again


def test_a_graph_that_takes_no_nodes_is_as_it_was(runtime: Runtime) -> None:
    intake, graph = Intake(drawn(0)), Graph(lambda: None)
    runtime.refuse = [0, INVALID]
    with pytest.raises(Unfit):
        Copies(runtime, graph, intake.pieces(), [torch.ones(2)], drawn(0))  # type: ignore[arg-type]
    assert graph.exec is not None
    assert list(graph.exec.work) == [1]
    assert not graph.exec.edges


def test_another_current_device_is_left_for_that_of_the_graph(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    class On:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: Any) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device", On)
    entry = entry_of(runtime, drawn(0), lambda x, y: x + y, numbered=True)
    seen: list[tuple[str, int]] = []
    for name in ("place", "instantiate", "launch"):
        plain = getattr(runtime, name)
        monkeypatch.setattr(runtime, name, lambda *a, name=name, plain=plain: (seen.append((name, current[0])), plain(*a))[1])
    current[0] = 1
    entry.replay(drawn(1))
    assert set(seen) == {("place", 0), ("instantiate", 0), ("launch", 0)}
    assert current == [1]
