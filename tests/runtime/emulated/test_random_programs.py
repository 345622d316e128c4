"""Random programs of a dozen operations: eager, and captured once and replayed, give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from parity.runtime.emulated import device

Registers = list[Tensor]


def _out_of_place(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Registers, int, int], None]:
    def run(r: Registers, i: int, j: int) -> None:
        r.append(function(r[i], r[j]))

    return run


def _in_place(r: Registers, i: int, j: int) -> None:
    r[i].mul_(0.5).add_(r[j].detach().clone(), alpha=0.25)


def _write_through_view(r: Registers, i: int, j: int) -> None:
    r[i].t()[1].copy_(r[j][1, :])


def _fill_by_mask(r: Registers, i: int, j: int) -> None:
    r[i][r[j] > 0.5] = 0.125


def _grow_metadata(r: Registers, i: int, j: int) -> None:
    r.append((r[i] + 1).unsqueeze_(0).squeeze_(0))


def _running_state(r: Registers, i: int, j: int) -> None:
    r[0].add_(r[i].detach().tanh())


OPERATIONS: dict[str, Callable[[Registers, int, int], None]] = {
    "add": _out_of_place(lambda a, b: a + b),
    "matmul": _out_of_place(lambda a, b: torch.tanh(a @ b)),
    "where": _out_of_place(lambda a, b: torch.where(a > b, a, b * 2)),
    "softmax": _out_of_place(lambda a, b: F.softmax(a, 1) - b),
    "transpose": _out_of_place(lambda a, b: a.t()),
    "slice": _out_of_place(lambda a, b: torch.cat([a[1:], b[:1]])),
    "gather": _out_of_place(lambda a, b: a.gather(1, b.argsort(1))),
    "expand": _out_of_place(lambda a, b: a[:1].expand_as(b)),
    "factory": _out_of_place(lambda a, b: a + torch.arange(4, device=a.device)),
    "rand": _out_of_place(lambda a, b: a + torch.rand(4, 4, device="cuda")),
    "normal": _out_of_place(lambda a, b: torch.empty_like(a).normal_() * b),
    "dropout": _out_of_place(lambda a, b: F.dropout(a, 0.4)),
    "randperm": _out_of_place(lambda a, b: a[torch.randperm(4, device="cuda")]),
    "in_place": _in_place,
    "write_through_view": _write_through_view,
    "fill_by_mask": _fill_by_mask,
    "metadata": _grow_metadata,
    "running_state": _running_state,
}
WRITES = {"in_place", "write_through_view", "fill_by_mask"}
Program = list[tuple[str, int, int]]
programs = st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=12)


def run(program: Program, state: Tensor, x: Tensor) -> list[Tensor]:
    """``state`` outlives a call and changes in it, ``x`` is the input."""
    registers = [state, x, x + state]
    for name, i, j in program:
        i, j = i % len(registers), j % len(registers)
        if name in WRITES and not _writable(registers[i]):
            i = 0
        OPERATIONS[name](registers, i, j)
    return registers


def _writable(t: Tensor) -> bool:
    return 0 not in t.stride()


def bits(tensors: list[Tensor]) -> list[Any]:
    return [t.detach().cpu().contiguous().view(torch.int32).tolist() for t in tensors]


@given(program=programs, seed=st.integers(0, 2**32), inference_mode=st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_replay_equals_eager(program: Program, seed: int, inference_mode: bool) -> None:
    with device(), torch.no_grad(), torch.inference_mode(inference_mode):
        torch.manual_seed(seed)
        start = torch.randn(4, 4, device="cuda")
        inputs = [torch.randn(4, 4, device="cuda") for _ in range(3)]
        generator = torch.cuda.get_rng_state()

        state, eager = start.clone(), []
        for x in inputs:
            static = x.clone()
            eager.append(bits(run(program, state, static)))
        drawn = torch.cuda.get_rng_state().tolist()

        torch.cuda.set_rng_state(generator)
        state, static = start.clone(), inputs[0].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(program, state, static)
        assert bits([state, static]) == bits([start, inputs[0]])
        for x, expected in zip(inputs, eager, strict=True):
            static.copy_(x)
            graph.replay()
            assert bits(out) == expected
        assert torch.cuda.get_rng_state().tolist() == drawn
        assert graph.stale == []
