"""Probes: legal, repeatable, unlike each other, and the same bits for every engine."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from parity.judge.bits import same
from parity.rows.family import Family, Fixed, Input, Subject
from parity.rows.probes import PROBES, draw, make
from parity.rows.row import Row
from parity.runtime import tree

SEEDS = st.integers(0, 2**32 - 1)
NAMES = st.sampled_from(PROBES)
EDGES = st.floats(-1000, 1000, width=16)


@given(NAMES, SEEDS, EDGES, EDGES, st.sampled_from(["float16", "bfloat16", "float32", "float64"]))
def test_floats_stay_in_their_range(name: str, seed: int, one: float, other: float, dtype: str) -> None:
    low, high = sorted((one, other))
    drawn = draw(Input((4, 16), low, high, dtype), name, seed)
    edges = torch.tensor([low, high], dtype=drawn.dtype)  # an edge that the dtype does not have is rounded like any other number
    assert drawn.dtype is getattr(torch, dtype)
    assert drawn.shape == (4, 16)
    assert bool((drawn >= edges[0]).all())
    assert bool((drawn <= edges[1]).all())


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize(
    ("low", "high", "dtype"), [(0, 1, "bool"), (0, 255, "uint8"), (-128, 127, "int8"), (-2, 2, "int32"), (5, 5, "int64")]
)
def test_integers_reach_both_edges_and_nothing_beyond(name: str, low: int, high: int, dtype: str) -> None:
    drawn = draw(Input((4096,), low, high, dtype), name, 0).to(torch.int64)
    assert (int(drawn.min()), int(drawn.max())) == (low, high)


@given(NAMES, SEEDS)
def test_a_seed_says_everything(name: str, seed: int) -> None:
    spec = Input((3, 5))
    torch.manual_seed(1)
    first = draw(spec, name, seed)
    torch.manual_seed(2)
    assert same(draw(spec, name, seed), first)


@given(SEEDS)
def test_a_draw_leaves_the_default_generator_alone(seed: int) -> None:
    before = torch.get_rng_state()
    make((Input((3,)), Input((3,), 0, 9, "int64")), "B", seed)
    assert torch.equal(torch.get_rng_state(), before)


@given(SEEDS, st.sampled_from(["float32", "float16", "int64"]))
def test_a_and_b_differ_and_so_do_positions(seed: int, dtype: str) -> None:
    specs = (Input((64,), 0, 100, dtype), Input((64,), 0, 100, dtype))
    (a, second), _ = make(specs, "A", seed)
    (b, _), _ = make(specs, "B", seed)
    assert not same(a, b)
    assert not same(a, second)


def test_b_is_folded_not_clamped() -> None:
    drawn = draw(Input((100_000,)), "B", 0)
    assert int((drawn == 0).sum()) + int((drawn == 1).sum()) < 10
    counts = torch.histc(drawn, 10, 0, 1)
    assert float(counts.min() / counts.max()) > 0.5


def test_the_bits_of_a_probe_stand_forever() -> None:
    """Evidence names a probe by its seed, so the draw behind a seed may never change."""
    drawn = draw(Input((2, 3)), "A", 7)  # of B as much as a libm's logarithm allows
    assert hashlib.sha256(drawn.numpy().tobytes()).hexdigest()[:12] == "342ba75f5c27"


@pytest.mark.parametrize("spec", [Input((2,)), Input((2,), 0, 5, "int64")])
def test_an_unknown_probe(spec: Input) -> None:
    with pytest.raises(ValueError, match="no probe is called 'C': A, B"):
        draw(spec, "C", 0)


def test_fixed_and_plain_leaves_are_the_same_in_every_probe() -> None:
    marker = object()
    specs = ({"x": Input((2,)), "at": Fixed([[1, 2], [3, 4]])}, [Fixed(0.5, "float64"), None, "text", 3, marker])
    values = {name: make(specs, name, 5) for name in PROBES}
    for name in PROBES:
        (mapping, rest), described = values[name]
        assert same(mapping["at"], torch.tensor([[1, 2], [3, 4]]))
        assert same(rest[0], torch.tensor(0.5, dtype=torch.float64))
        assert rest[1:] == [None, "text", 3, marker]
        assert [d["probe"] for d in described] == [name]
    assert not same(values["A"][0][0]["x"], values["B"][0][0]["x"])


def test_a_tensor_can_be_drawn_again_from_its_description() -> None:
    value, (told,) = make((1, Input((2, 3), -1, 2, "float16")), "B", 9)
    assert told["distribution"] == "normal, 3x + 2, folded"
    again = draw(Input(tuple(told["shape"]), told["low"], told["high"], told["dtype"]), told["probe"], told["seed"])
    assert same(again, value[1])
    _, (told,) = make((Input((2,), 0, 3, "int64"),), "B", 9)
    assert told["distribution"] == "uniform"


def test_specs_survive_a_flattening_by_the_runtime() -> None:
    """The runtime registers the dataclasses it meets with torch's pytree; a declared input must stay one leaf all the same."""
    specs = (Input((2,)), Fixed([1]))
    tree.flatten(specs)
    try:
        value, described = make(specs, "A", 0)
        assert [x.shape for x in value] == [(2,), (1,)]
        assert len(described) == 1
    finally:
        for kind in (Input, Fixed):
            pytree.SUPPORTED_NODES.pop(kind, None)


def test_engines_are_given_the_same_bits() -> None:
    from parity.judge.subject import Bench
    from parity.runtime.engine import engine

    module = torch.nn.Identity()
    family = Family("zoo", "f", "t", lambda settings: Subject(module, module), lambda size, batch: (Input((batch, 3)), Fixed([1]), 2))
    emulated = engine("emulated")
    bench = Bench(Row("zoo", "f", "t"), family, emulated, 3)
    host, _ = make(family.inputs(0, 1), "B", 3)
    with emulated.entered():
        args: Any = bench.args("B")
        assert all(x.is_cuda for x in args[:2])
        with emulated.quiet():
            back = [x.clone() for x in args[:2]]
    assert same(back[0], host[0])
    assert same(back[1], host[1])
    assert args[2] == 2
