"""Results: of the caller's structure, each in memory of its own, with eager's strides and bits, however many there are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parity.runtime import buffers, tree
from parity.runtime.buffers import Intake, Outlet, dense
from parity.runtime.emulated import device
from parity.runtime.state import same_bits


@pytest.fixture(autouse=True, params=["fused", "piecewise"])
def _copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With torch's fused clone, where there is one, and without it."""
    if request.param == "piecewise":
        monkeypatch.setattr(buffers, "_CLONES", None)
    elif buffers._CLONES is None:
        pytest.skip("this torch has no fused clone")
    with torch.no_grad():
        yield


class Pair(NamedTuple):
    left: Any
    right: Any


def made(position: int) -> Tensor:
    """Plain ones and odd ones, of several types."""
    torch.manual_seed(position)
    kinds = (
        lambda: torch.randn(2, 3),
        lambda: torch.randint(0, 9, (4,)),
        lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        lambda: torch.randn(3, 4).t(),
        lambda: torch.randn(0, 3),
        lambda: torch.randn(4, 6)[:, ::2],
        lambda: torch.randn(1, 6).expand(4, 6),
        lambda: torch.randn(2, 2, dtype=torch.complex64).conj(),
        lambda: torch.randn(5).bfloat16(),
        lambda: torch.tensor([0.0, -0.0, float("nan")]),
    )
    return kinds[position % len(kinds)]()


def alike(one: Any, other: Any) -> bool:
    (left, spec), (right, theirs) = tree.flatten(one), tree.flatten(other)
    return spec == theirs and all(
        same_bits(a, b) if isinstance(a, Tensor) else (type(a), a) == (type(b), b) for a, b in zip(left, right, strict=True)
    )


NESTED = st.recursive(
    st.integers(0, 9).map(made) | st.sampled_from([1, 2.5, None, "word"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.sampled_from(["x", "y", "a b", 3, ("t", 1)]), inner, max_size=4)
        | st.tuples(inner, inner).map(lambda two: Pair(*two))
        | st.dictionaries(st.sampled_from("xy"), inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(NESTED)
def test_any_result_comes_out_as_it_is(result: Any) -> None:
    assert alike(Outlet(result, [], clone=True).hand_out([]), result)


def containers(value: Any) -> list[int]:
    children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    own = [id(value)] if isinstance(value, (list, dict)) else []
    return [*own, *(i for child in children for i in containers(child))]


def test_each_call_gets_containers_of_its_own() -> None:
    outlet = Outlet({"a": [made(0), {"b": made(1)}], "c": ([made(2)],)}, [], clone=True)
    one, other = outlet.hand_out([]), outlet.hand_out([])
    assert not set(containers(one)) & set(containers(other))
    one["a"].clear()
    assert len(outlet.hand_out([])["a"]) == 2


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_results_share_no_memory(count: int) -> None:
    statics = tuple(made(i % 4) for i in range(count))
    outlet = Outlet(statics, [], clone=True)
    held = [*outlet.hand_out([]), *outlet.hand_out([])]
    places = [t.untyped_storage().data_ptr() for t in (*held, *statics)]
    assert len(set(places)) == 3 * count
    expected = [t.clone() for t in held]
    for t in statics:
        t.zero_()
    assert all(map(same_bits, held, expected))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_results_are_as_free_as_eagers(count: int) -> None:
    """No views, each with a version counter of its own: one may be written to while another is saved for a backward."""
    results = Outlet(tuple(made(0) for _ in range(count)), [], clone=True).hand_out([])
    assert not any(t._is_view() for t in results)
    before = [t._version for t in results]
    results[0].add_(1)
    assert [t._version for t in results[1:]] == before[1:]
    weight = torch.ones(2, 3, requires_grad=True)
    with torch.enable_grad():
        results[-1].mul_(weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_strides_of_dense_results_are_eagers(dtype: torch.dtype) -> None:
    statics = [
        torch.zeros(2, 3, 4, 5, dtype=dtype).permute(*order) for order in ((0, 2, 3, 1), (3, 2, 1, 0), (0, 1, 2, 3), (1, 0, 3, 2))
    ]
    statics.append(torch.zeros(1, 6, dtype=dtype).as_strided((1, 6), (17, 1)))
    assert all(map(dense, statics))
    results = Outlet(statics, [], clone=True).hand_out([])
    assert [t.stride() for t in results] == [t.stride() for t in statics]


def test_an_input_passed_on_and_a_result_given_twice_stay_the_same_object() -> None:
    static, own, twice = torch.ones(2), torch.zeros(2), made(0)
    result = Outlet([static, twice, {"again": twice}, made(1)], [static], clone=True).hand_out([own])
    assert result[0] is own
    assert result[1] is result[2]["again"]


def test_without_clones_the_graphs_own_tensors_come_out() -> None:
    statics = [made(0), made(1), made(2)]
    results = Outlet(statics, [], clone=False).hand_out([])
    assert all(a is b for a, b in zip(results, statics, strict=True))


@pytest.mark.parametrize("kinds", [[0], [6], [0, 1, 2, 3, 4, 5, 8], [0, 6, 1]])
def test_inputs_are_filled_in_their_geometry(kinds: list[int]) -> None:
    leaves: list[Any] = [*map(made, kinds), 3]
    values: list[Any] = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in leaves[:-1]] + [3]
    for value in values[:-1]:
        buffers.flat(value).copy_(torch.arange(len(buffers.flat(value))).to(value.dtype) + 1)
    intake = Intake(leaves)
    intake.fill(values)
    assert [x.stride() for x in intake.leaves[:-1]] == [x.stride() for x in leaves[:-1]]
    assert all(map(torch.equal, intake.leaves[:-1], values[:-1]))
    assert not {x.untyped_storage().data_ptr() for x in intake.leaves[:-1] if x.numel()} & {x.data_ptr() for x in values[:-1]}


def test_on_a_device_results_are_on_it() -> None:
    with device():
        statics = [made(0).to("cuda"), made(1).to("cuda"), made(2).to("cuda")]
        assert all(t.is_cuda for t in Outlet(statics, [], clone=True).hand_out([]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kinds", [[0], [0, 2], [0, 2, 3], [0, 1, 2, 3, 4, 8, 9] * 3])
def test_on_cuda_results_have_eagers_strides_bits_and_alignment(kinds: list[int]) -> None:
    statics = [made(kind).to("cuda") for kind in kinds]
    results = Outlet(statics, [], clone=True).hand_out([])
    assert all(map(same_bits, results, statics))
    assert [t.stride() for t in results] == [t.stride() for t in statics]
    assert not any(t.data_ptr() % 512 for t in results)
