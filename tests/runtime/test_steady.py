"""The shortcut of a steady call: the region's results, or a word that nothing was done. On graphs that are played."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from parity.runtime.cudart import CudaError
from parity.runtime.record import Entry
from parity.runtime.state import same_bits
from parity.runtime.steady import MISS, steady

from .played import ILLEGAL_ADDRESS, INVALID, OUT_OF_MEMORY, STREAM, Runtime, entry_of, runtime

__all__ = ["runtime"]


def drawn(seed: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))


def region(x: Tensor) -> dict[str, Any]:
    return {"sum": x + 1, "more": [x * 2, x.t().contiguous()]}


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Its last item: whether somebody captures."""
    said = [False]
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: said[-1], raising=False)
    return said


@pytest.fixture
def entry(runtime: Runtime, capturing: list[bool]) -> Entry:
    return entry_of(runtime, [drawn(0)], region, numbered=True)


def shortcut_of(entry: Entry) -> Callable[[Any], Any]:
    found = steady(entry, drawn(0))
    if found is None:
        pytest.skip("this torch has no guards of tensors and of global state")
    return found


def equal(found: Any, x: Tensor) -> bool:
    expected = region(x)
    return same_bits(found["sum"], expected["sum"]) and all(map(same_bits, found["more"], expected["more"]))


def test_results_are_those_of_the_region_and_stay(entry: Entry, runtime: Runtime) -> None:
    call = shortcut_of(entry)
    inputs = [drawn(seed) for seed in range(12)]
    held = [call(x) for x in inputs]
    assert all(map(equal, held, inputs))
    assert entry.replays == len(runtime.launches) == 12
    result = None
    for x in inputs:  # one is held until the next comes
        result = call(x)
        assert equal(result, x)


def test_it_and_the_general_way_take_turns(entry: Entry) -> None:
    call, general = shortcut_of(entry), entry.replay
    held = []
    for seed in range(12):
        held.append(call(drawn(seed)) if seed % 3 else general([drawn(seed)]))
    assert all(equal(result, drawn(seed)) for seed, result in enumerate(held))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["shortcut", "general"]),
            st.sampled_from([0, 1, 2, None]),  # one of three inputs that stay, written anew, or another one
            st.sampled_from(["hold", "drop", "drop all"]),
            st.sampled_from([[], [], [], [0, 0, 0, INVALID], [OUT_OF_MEMORY]]),
        ),
        max_size=25,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_whatever_is_held_where_results_lie_and_what_cuda_refuses(runtime: Runtime, capturing: list[bool], steps: list[Any]) -> None:
    entry = entry_of(runtime, [drawn(0)], region, numbered=True)
    call, staying = shortcut_of(entry), [drawn(0).clone() for _ in range(3)]
    held: list[tuple[Any, Tensor]] = []
    for number, (way, which, keep, refused) in enumerate(steps, 1):
        x = drawn(number) if which is None else staying[which].copy_(drawn(number))
        runtime.refuse = list(refused)
        result = call(x) if way == "shortcut" else MISS
        if result is MISS:
            result = entry.replay([x])
        runtime.refuse = []
        if keep == "drop all":
            held.clear()
        if keep == "hold":
            held.append((result, drawn(number)))
        assert equal(result, drawn(number))
        assert all(equal(r, given) for r, given in held)
    assert entry.replays == len(steps)


CHANGES: dict[str, Callable[[Entry, pytest.MonkeyPatch], Any]] = {
    "another size": lambda entry, patch: torch.ones(4, 5),
    "another type": lambda entry, patch: torch.ones(4, 4, dtype=torch.float64),
    "no tensor": lambda entry, patch: 3,
    "somebody captures": lambda entry, patch: patch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True),
    "another stream": lambda entry, patch: patch.setattr(entry.pool, "number", STREAM + 1),
    "a stream that does not last": lambda entry, patch: patch.setattr(entry.pool, "number", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_as_before_goes_the_general_way(
    entry: Entry, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    if change == "somebody captures":
        CHANGES[change](entry, monkeypatch)
    call, x = shortcut_of(entry), drawn(1)
    if change != "somebody captures":
        assert equal(call(x), x)
        x = other if (other := CHANGES[change](entry, monkeypatch)) is not None else x
    launched = len(runtime.launches)
    assert call(x) is MISS
    assert len(runtime.launches) == launched == entry.replays


def test_a_global_switch_is_seen(entry: Entry) -> None:
    call = shortcut_of(entry)
    with torch.inference_mode():
        assert call(drawn(1)) is MISS
    assert equal(call(drawn(1)), drawn(1))


def test_a_tensor_that_is_in_doubt_is_asked_for(runtime: Runtime, capturing: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    made = entry_of(runtime, [drawn(0)], region, numbered=True)
    made.derived = object()  # type: ignore[assignment]
    doubt = [False]
    monkeypatch.setattr(made, "doubtful", lambda: doubt[-1], raising=False)
    call = shortcut_of(made)
    assert equal(call(drawn(1)), drawn(1))
    doubt.append(True)
    assert call(drawn(1)) is MISS


def test_memory_that_cuda_does_not_take_is_left_to_the_general_way(entry: Entry, runtime: Runtime) -> None:
    call = shortcut_of(entry)
    held = call(drawn(1))
    entry.copies._spare = 0  # type: ignore[union-attr]
    runtime.refuse = [INVALID]
    assert call(drawn(2)) is MISS
    runtime.refuse = [INVALID]
    assert equal(entry.replay([drawn(3)]), drawn(3))
    assert entry.copies is None  # withdrawn by the general way
    assert call(drawn(2)) is MISS
    assert equal(held, drawn(1))


def test_a_launch_that_fails_is_raised_and_the_pool_is_free(entry: Entry, runtime: Runtime) -> None:
    call, x = shortcut_of(entry), drawn(1)
    held = call(x)
    runtime.broken = ILLEGAL_ADDRESS
    with pytest.raises(CudaError, match="the launch of a graph: CUDA error 700"):
        call(x)
    runtime.broken = 0
    assert not entry.pool.lock.locked()  # type: ignore[attr-defined]
    assert equal(held, x)
    assert equal(call(x), x)


@pytest.mark.parametrize("why", ["it draws", "no copies", "an output that is no copy", "results are the graph's own", "an empty input"])
def test_there_is_none_where_more_is_to_be_done(runtime: Runtime, capturing: list[bool], why: str) -> None:
    odd = (lambda x: (x + 1, 7)) if why == "an output that is no copy" else region
    x = drawn(0)[:0] if why == "an empty input" else drawn(0)
    made = entry_of(runtime, [x], odd, numbered=why != "it draws", clone=why != "results are the graph's own")
    if why == "no copies":
        made.copies = None
    assert steady(made, x) is None


def test_elsewhere_than_on_the_graphs_device_the_general_way_is_gone(
    runtime: Runtime, capturing: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    call = shortcut_of(entry_of(runtime, [drawn(0)], region, numbered=True))
    assert equal(call(drawn(1)), drawn(1))
    current.append(1)
    assert call(drawn(1)) is MISS
