"""A result is repeated only where every bit that a kernel reads is the same; what memory may hold is limited."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from parity.runtime import emulated
from parity.runtime.emulated.arena import Arena
from parity.runtime.emulated.repeats import COSTS, REPEATS, Repeats, pays, room, still

aten = torch.ops.aten
SIDE = 256


@pytest.fixture
def repeats() -> Repeats:
    return Repeats(2**26)


def _mm(repeats: Repeats, a: torch.Tensor, b: torch.Tensor, keep: bool = True) -> torch.Tensor:
    func = aten.mm.default
    result: torch.Tensor = repeats.result(func, func, (a, b), {}, keep=keep)
    return result


def _operands(side: int = SIDE) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(side, side, generator=generator), torch.randn(side, side, generator=generator)


def test_the_same_bits_elsewhere_are_computed_once(repeats: Repeats) -> None:
    a, b = _operands()
    first = _mm(repeats, a, b)
    again = _mm(repeats, a.clone(), b.clone())
    assert (repeats.computed, repeats.repeated) == (1, 1)
    assert torch.equal(first, again)
    assert torch.equal(first, a @ b)


@pytest.mark.parametrize("place", [0, SIDE * SIDE // 2 + 77, SIDE * SIDE - 1])
def test_one_bit_is_enough_to_compute_again(repeats: Repeats, place: int) -> None:
    a, b = _operands()
    _mm(repeats, a, b)
    other = a.clone()
    other.view(torch.int32).view(-1)[place] ^= 1
    got = _mm(repeats, other, b)
    assert (repeats.computed, repeats.repeated) == (2, 0)
    assert torch.equal(got, other @ b)


def test_minus_zero_is_not_zero(repeats: Repeats) -> None:
    a, b = torch.zeros(SIDE, SIDE), torch.ones(SIDE, SIDE)
    _mm(repeats, a, b)
    _mm(repeats, -a, b)
    assert repeats.computed == 2


def test_an_operand_written_in_place_is_computed_with(repeats: Repeats) -> None:
    a, b = _operands()
    before = _mm(repeats, a, b)
    a.mul_(2)
    assert torch.equal(_mm(repeats, a, b), a @ b)
    assert not torch.equal(before, a @ b)


def test_strides_and_arguments_count(repeats: Repeats) -> None:
    a, b = _operands()
    _mm(repeats, a, b)
    _mm(repeats, a, b.t().contiguous().t())
    assert (repeats.computed, repeats.repeated) == (2, 0)
    func, bias = aten.addmm.default, torch.ones(SIDE)
    once, twice = (repeats.result(func, func, (bias, a, b), {"beta": beta}, keep=True) for beta in (1.0, 2.0))
    assert torch.equal(twice, torch.addmm(bias, a, b, beta=2.0))
    assert not torch.equal(once, twice)
    assert repeats.repeated == 0


def test_settings_count(repeats: Repeats) -> None:
    a, b = _operands()
    _mm(repeats, a, b)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        _mm(repeats, a, b)
    finally:
        torch.set_float32_matmul_precision(before)
    assert repeats.repeated == 0


def test_what_is_kept_is_the_callers_own(repeats: Repeats) -> None:
    a, b = _operands()
    first = _mm(repeats, a, b)
    first.fill_(7)
    second = _mm(repeats, a, b)
    second.fill_(8)
    assert torch.equal(_mm(repeats, a, b), a @ b)
    assert repeats.repeated == 2


def test_a_result_lies_in_memory_as_the_kernel_laid_it(repeats: Repeats) -> None:
    x = torch.randn(1, 32, 48, 48).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(32, 32, 3, 3).contiguous(memory_format=torch.channels_last)
    func, args = aten.convolution.default, (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    first, again = (repeats.result(func, func, args, {}, keep=True) for _ in range(2))
    assert repeats.repeated == 1
    assert first.stride() == again.stride()
    assert torch.equal(first, again)


def test_what_does_not_fit_is_computed_every_time() -> None:
    repeats = Repeats(SIDE * SIDE * 4 + 1)
    a, b = _operands()
    for _ in range(3):
        assert torch.equal(_mm(repeats, a, b), a @ b)
    assert repeats.repeated == 0
    assert repeats.held <= repeats.limit


def test_forgotten_results_are_computed_again(repeats: Repeats) -> None:
    a, b = _operands()
    _mm(repeats, a, b)
    repeats.forget()
    assert repeats.held == 0
    other = torch.randn(SIDE, SIDE)
    assert torch.equal(_mm(repeats, other, b), other @ b)
    assert torch.equal(_mm(repeats, a, b), a @ b)
    assert repeats.repeated == 0


def test_forgotten_memory_is_used_again(repeats: Repeats) -> None:
    a, b = _operands()
    addresses = []
    for _ in range(2):
        _mm(repeats, a, b)
        addresses.append(_mm(repeats, a, b, keep=False).data_ptr())
        repeats.forget()
    assert addresses[0] == addresses[1]


def test_small_work_is_not_worth_it(repeats: Repeats) -> None:
    a, b = _operands(8)
    for _ in range(2):
        _mm(repeats, a, b)
    assert (repeats.computed, repeats.repeated, repeats.held) == (0, 0, 0)
    assert not pays(COSTS["aten::mm"](a, b), 512)
    assert room() > 2**20


def test_a_device_repeats_eager_and_replays_without_gradients_alone() -> None:
    with emulated.device():
        layer = torch.nn.Linear(SIDE, SIDE).cuda()
        x = torch.randn(SIDE, SIDE, device="cuda")
        assert REPEATS.computed == 0
        layer(x)
        assert REPEATS.computed == 0, "with gradients every kernel runs"
        with torch.no_grad():
            expected = layer(x).clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                static = layer(x)
            graph.replay()
            assert torch.equal(static, expected)
            assert (REPEATS.computed, REPEATS.repeated) == (1, 2)
            x.mul_(3)
            graph.replay()
            assert REPEATS.computed == 2, "a replay computes with what lies there when it runs"
            assert torch.equal(static, layer(x))
            assert not torch.equal(static, expected)
    assert REPEATS.held == 0


def _replayed(region: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = region(x)

    def replay() -> torch.Tensor:
        graph.replay()
        return out.clone()

    return replay


@pytest.fixture
def device() -> Iterator[None]:
    with emulated.device(), torch.no_grad():
        yield


def _counts() -> tuple[int, int]:
    return REPEATS.run, REPEATS.skipped


@pytest.mark.usefixtures("device")
def test_a_replay_of_the_same_bits_is_skipped() -> None:
    x = torch.randn(SIDE, SIDE, device="cuda")
    replay = _replayed(lambda x: (x * 2).cumsum(0), x)
    first = replay()
    x.neg_()
    other = replay()
    x.neg_()
    assert torch.equal(replay(), first)
    assert torch.equal(other, (x.neg() * 2).cumsum(0))
    assert _counts() == (2, 1)


def _one_bit_apart() -> None:
    """Asserts that a replay sees one bit of its input, and one of a weight, that lie where no sample is taken."""
    x, weight = torch.ones(SIDE, SIDE, device="cuda"), torch.ones(SIDE, SIDE, device="cuda")
    replay = _replayed(lambda x: x + weight, x)
    replay()
    for tensor in (x, weight):
        tensor.view(torch.int32).view(-1)[SIDE * SIDE // 2 + 77] ^= 1
        assert torch.equal(replay(), x + weight)


@pytest.mark.usefixtures("device")
def test_one_bit_is_enough_to_replay_again() -> None:
    _one_bit_apart()
    assert _counts() == (3, 0)


@pytest.mark.usefixtures("device")
def test_a_memory_that_compares_too_little_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.runtime.emulated.repeats._memcmp", lambda *_: 0)
    with pytest.raises(AssertionError):
        _one_bit_apart()


@pytest.mark.usefixtures("device")
def test_state_that_a_replay_reads_and_writes_counts() -> None:
    x, total = torch.ones(SIDE, device="cuda"), torch.zeros(SIDE, device="cuda")
    replay = _replayed(lambda x: total.add_(x) * 1, x)
    assert [float(replay()[0]) for _ in range(3)] == [1, 2, 3]
    total.zero_()
    assert [float(replay()[0]) for _ in range(3)] == [1, 2, 3]
    assert float(total[0]) == 3
    assert _counts() == (3, 3)


@pytest.mark.usefixtures("device")
def test_random_numbers_are_drawn_each_time() -> None:
    x = torch.ones(SIDE, device="cuda")
    replay = _replayed(lambda x: x * torch.rand_like(x), x)
    assert not torch.equal(replay(), replay())
    assert _counts() == (2, 0)


@pytest.mark.usefixtures("device")
def test_a_poisoned_result_is_put_back() -> None:
    x = torch.ones(SIDE, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x + 1
    graph.replay()
    graph.poison()  # type: ignore[attr-defined]
    assert out.isnan().all()
    graph.replay()
    assert torch.equal(out, x + 1)


def test_a_replay_that_writes_in_secret_is_run_again(repeats: Repeats) -> None:
    x, out = torch.zeros(4).untyped_storage(), torch.zeros(4).untyped_storage()

    def run() -> bool:
        x.fill_(0)  # type: ignore[attr-defined]
        x[0] = 1
        return True

    for _ in range(2):
        x.fill_(0)  # type: ignore[attr-defined]
        repeats.replay(1, [x], [out], run)
        assert x[0] == 1
    assert (repeats.run, repeats.skipped) == (2, 0)


def test_attention_is_repeated_unless_it_drops(repeats: Repeats) -> None:
    func = aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.randn(1, 2, SIDE, 64)
    mask = torch.zeros(SIDE, SIDE)
    first, again = (repeats.result(func, func, (q, q, q), {"attn_mask": mask.clone()}, keep=True) for _ in range(2))
    assert (repeats.computed, repeats.repeated) == (1, 1)
    assert all(map(torch.equal, first, again))
    mask[SIDE // 2, 77] = -1
    other = repeats.result(func, func, (q, q, q), {"attn_mask": mask}, keep=True)
    assert torch.equal(other[0], func(q, q, q, attn_mask=mask)[0])
    assert not torch.equal(other[0], first[0])
    assert still(func, (q, q, q, 0.0))
    assert not still(func, (q, q, q, 0.1))


def test_an_operation_of_a_library_that_is_not_known_is_run_each_time() -> None:
    """It may draw, or count, where nobody sees it."""
    with torch.library._scoped_library("parity_draws", "DEF") as library:
        library.define("drawn(Tensor x) -> Tensor")
        library.impl("drawn", lambda x: x + torch.rand(()), "CompositeExplicitAutograd")
        with emulated.device(), torch.no_grad():
            x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = torch.ops.parity_draws.drawn(x)
            values = set()
            for _ in range(4):
                graph.replay()
                values.add(float(y[0]))
    assert len(values) == 4


@pytest.mark.parametrize("kind", ["nested", "no matrix"])
def test_a_call_that_has_no_cost_is_the_kernels_business(repeats: Repeats, kind: str) -> None:
    if kind == "nested":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
        args: tuple[Any, ...] = (nested, nested.transpose(1, 2))
        func = torch.ops.aten.bmm.default
    else:
        args, func = (torch.ones(2, 3), torch.tensor(1.0)), torch.ops.aten.mm.default
    said = []
    for call in (func, lambda *a: repeats.result(func, func, a, {}, keep=True)):
        try:
            said.append(type(call(*args)).__name__)
        except RuntimeError as error:
            said.append(str(error))
    assert said[0] == said[1]


def test_whether_denormals_are_flushed_counts(repeats: Repeats) -> None:
    a, b = torch.full((256, 256), 1e-20), torch.full((256, 256), 1e-20)
    func = torch.ops.aten.mm.default
    kept = repeats.result(func, func, (a, b), {}, keep=True)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        assert torch.equal(repeats.result(func, func, (a, b), {}, keep=True), func(a, b))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(repeats.result(func, func, (a, b), {}, keep=True), kept)


def test_an_arena_stays_as_large_as_its_largest_use() -> None:
    arena = Arena()
    for size in (60, 70, 80, 90, 100, 30, 5):
        held = [arena.piece(size << 10) for _ in range(3000 // size * 25)]
        assert all(place + (size << 10) <= len(slab) for slab, place, _ in held)
        large = [arena.piece((65 + n) << 20) for n in range(2)]
        del held, large
        arena.clear()
        assert len(arena._slabs) <= 2


def test_a_replay_that_fails_leaves_nothing_behind() -> None:
    with emulated.device(), torch.no_grad():
        x, index = torch.randn(300, 300, device="cuda"), torch.zeros(2, dtype=torch.long, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x @ x + 1).index_select(0, index)
        graph.replay()
        index.fill_(999)
        with pytest.raises((IndexError, RuntimeError)):
            graph.replay()
        last = [transient for step in graph._tape._steps for transient in step.last]
        assert last
        assert sum(view.tensor.untyped_storage().nbytes() for transient in last for view in transient._views) == 0
        index.zero_()
        graph.replay()
        assert torch.equal(y, (x @ x + 1).index_select(0, index))
