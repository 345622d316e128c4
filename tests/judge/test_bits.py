"""Bits: equal ones are no difference, one flipped bit always is, and every helper is shown a wrong answer that it must find."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from parity.judge import bits
from parity.judge.bits import Bundle, Difference, bundle, compare, difference, ordered, raw, same
from parity.runtime.state import unlike

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # said once per process
FLOAT8 = [getattr(torch, n) for n in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz") if hasattr(torch, n)]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
DTYPES = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX, *FLOAT8]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor with exactly these bytes, NaN payloads included."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone().view(dtype).reshape(shape)


def flipped(tensor: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    """A contiguous copy with one bit of one element changed."""
    data = bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    data[element * tensor.element_size() + bit // 8] ^= 1 << (bit % 8)
    return from_bytes(bytes(data), tensor.dtype, tuple(tensor.shape))


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES, shapes: st.SearchStrategy[tuple[int, ...]] = SHAPES) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(dtypes)), draw(shapes)
    size = math.prod(shape) * dtype.itemsize
    if dtype is torch.bool:
        return from_bytes(bytes(draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))), dtype, shape)
    return from_bytes(draw(st.binary(min_size=size, max_size=size)), dtype, shape)


@st.composite
def views(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """The same values, laid out otherwise: transposed, strided or doubly conjugated."""
    kinds = ["same", "transposed", "strided"] + ["conjugated"] * tensor.is_complex()
    kind = draw(st.sampled_from(kinds))
    if kind == "transposed":
        turned = tuple(range(tensor.dim()))[::-1]
        return tensor.permute(turned).contiguous().permute(turned)
    if kind == "strided":
        wide = torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)
        return wide.select(-1, 0)
    if kind == "conjugated":
        return torch.view_as_complex(torch.view_as_real(tensor) * torch.tensor([1.0, 1.0]).to(torch.view_as_real(tensor).dtype)).conj()
    return tensor


@given(st.data())
def test_equal_bits_are_no_difference_however_they_lie(data: st.DataObject) -> None:
    tensor = data.draw(tensors([d for d in DTYPES if not d.is_complex]))
    other = data.draw(views(tensor.clone()))
    assert same(other, tensor)
    assert difference("x", other, tensor) is None
    assert unlike([other], [tensor]) == [False]
    assert bundle([("x", other)]).unlike(bundle([("x", tensor)])) == []


@given(tensors(COMPLEX))
def test_a_lazy_conjugate_is_its_own_conjugate_in_memory(tensor: torch.Tensor) -> None:
    lazy, eager = tensor.conj(), tensor.conj().resolve_conj()
    assert lazy.is_conj()
    assert same(lazy, eager)
    assert bundle([("x", lazy)]).unlike(bundle([("x", eager)])) == []


@given(tensors([torch.complex64, torch.complex128]))
def test_a_lazy_negation_is_its_own_negation_in_memory(tensor: torch.Tensor) -> None:
    lazy = tensor.conj().imag
    assert lazy.is_neg()
    assert same(lazy, lazy.resolve_neg().clone())


def test_an_expanded_tensor_is_what_it_looks_like() -> None:
    row = torch.randn(1, 3)
    assert same(row.expand(4, 3), row.repeat(4, 1))
    assert bundle([("x", row.expand(4, 3))]).unlike(bundle([("x", row.repeat(4, 1))])) == []
    assert not same(row.expand(4, 3), torch.cat([row.repeat(3, 1), row + 1]))


@given(st.data())
def test_one_flipped_bit_is_always_found(data: st.DataObject) -> None:
    tensor = data.draw(tensors())
    assume(tensor.numel() > 0)
    element = data.draw(st.integers(0, tensor.numel() - 1))
    bit = data.draw(st.integers(0, 0 if tensor.dtype is torch.bool else 8 * tensor.element_size() - 1))
    other = flipped(tensor, element, bit)
    assert not same(other, tensor)
    assert unlike([tensor, other], [tensor, tensor]) == [False, True]
    found = difference("x", other, tensor)
    assert found is not None
    assert (found.kind, found.count) == ("values", 1)
    parts = 2 if tensor.is_complex() else 1  # a complex number counts as its two parts
    assert found.first // parts == found.worst // parts == element
    assert found.total == tensor.numel() * parts
    assert (found.max_ulp > 0) == tensor.is_floating_point()
    assert bundle([("x", other)]).unlike(bundle([("x", tensor)])) == [found]


@given(tensors(), tensors())
def test_another_dtype_or_shape_is_a_difference_of_its_own(one: torch.Tensor, other: torch.Tensor) -> None:
    if one.dtype != other.dtype:
        expected = "dtype"
    elif one.shape != other.shape:
        expected = "shape"
    else:
        expected = "values" if not torch.equal(raw(one), raw(other)) else ""
    found = difference("x", one, other)
    assert (found.kind if found else "") == expected
    assert same(one, other) == (found is None)
    assert bool(bundle([("x", one)]).unlike(bundle([("x", other)]))) == (found is not None)


def test_the_same_bytes_of_another_dtype_are_not_the_same() -> None:
    tensor = torch.zeros(4)
    assert not same(tensor.view(torch.int32), tensor)
    assert not same(tensor.reshape(2, 2), tensor)
    assert [d.kind for d in bundle([("x", tensor.view(torch.int32))]).unlike(bundle([("x", tensor)]))] == ["dtype"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_minus_zero_is_not_zero(dtype: torch.dtype) -> None:
    minus, zero = torch.tensor([-0.0], dtype=dtype), torch.tensor([0.0], dtype=dtype)
    assert torch.equal(minus, zero)
    assert not same(minus, zero)
    found = difference("x", minus, zero)
    assert found is not None
    assert found.max_ulp == 1


def test_nan_payloads_count() -> None:
    quiet, other = (torch.tensor([bits_], dtype=torch.int32).view(torch.float32) for bits_ in (0x7FC00000, 0x7FC00001))
    assert quiet.isnan().all()
    assert other.isnan().all()
    assert same(quiet, quiet.clone())
    assert not same(quiet, other)
    assert not same(quiet, -quiet)


# ---- distances


_NUMPY = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


@given(st.data())
def test_a_step_of_nextafter_is_one_ulp(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(_NUMPY)))
    steps = data.draw(st.integers(1, 30))
    value = data.draw(st.floats(width=8 * dtype.itemsize, allow_nan=False, allow_infinity=False))
    towards = data.draw(st.sampled_from([-np.inf, np.inf]))
    kind = _NUMPY[dtype]
    moved = kind(value)
    for _ in range(steps):
        assume(moved != 0)  # nextafter knows one zero, bits know two: the next test
        with np.errstate(over="ignore", under="ignore"):
            moved = np.nextafter(moved, kind(towards))
    assume(np.isfinite(moved) and moved != 0)
    a, b = torch.tensor([value], dtype=dtype), torch.from_numpy(np.array([moved]))
    there, back = difference("x", a, b), difference("x", b, a)
    assert there is not None
    assert back is not None
    assert there.max_ulp == back.max_ulp == steps


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_two_zeros_lie_between_the_smallest_numbers(dtype: torch.dtype) -> None:
    tiny = torch.tensor(1, dtype=bits._INTEGER[dtype.itemsize]).view(dtype)
    assert [int(ordered(x)) for x in (-tiny, torch.zeros((), dtype=dtype).neg(), torch.zeros((), dtype=dtype), tiny)] == [-2, -1, 0, 1]


@given(tensors([*FLOATS, *FLOAT8], st.just((5,))))
def test_order_of_bits_is_order_of_values(tensor: torch.Tensor) -> None:
    values = tensor.double()
    assume(not values.isnan().any())
    places = ordered(tensor)
    for i in range(5):
        for j in range(5):
            if values[i] < values[j]:
                assert places[i] < places[j]


@given(st.data())
def test_the_worst_element_is_the_farthest_and_its_distance_exact(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(FLOATS))
    one, other = (data.draw(tensors([dtype], st.just((6,)))) for _ in range(2))
    found = difference("x", one, other)
    a, b = ordered(one).tolist(), ordered(other).tolist()
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    if found is None:
        assert max(gaps) == 0
        return
    assert found.max_ulp == max(gaps) == gaps[found.worst]
    assert found.first == next(i for i, gap in enumerate(gaps) if gap)
    assert found.count == sum(gap > 0 for gap in gaps)


def test_one_ulp_of_a_large_float64_is_not_lost() -> None:
    ones = torch.ones(3, dtype=torch.float64)
    off = torch.tensor([1.0, 1.0, math.nextafter(1.0, 2.0)], dtype=torch.float64)
    found = difference("x", off, ones)
    assert found is not None
    assert (found.worst, found.max_ulp) == (2, 1)


def test_integers_have_no_ulp() -> None:
    found = difference("x", torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert found == Difference("x", "values", 1, 2, 1, 1, -1)


# ---- what is no tensor


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (1, 1, ""),
        (1, 2, "object"),
        (1, True, "structure"),
        (1, 1.0, "structure"),
        (float("nan"), float("nan"), ""),
        (0.0, -0.0, "object"),
        (complex(0.0, 0.0), complex(0.0, -0.0), "object"),
        ("a", "b", "object"),
        (None, None, ""),
        (None, torch.zeros(1), "structure"),
        (torch.zeros(1), 0.0, "structure"),
        (torch.float32, torch.float16, "object"),
    ],
)
def test_plain_leaves_by_type_and_value(one: object, other: object, kind: str) -> None:
    found = difference("x", one, other)
    assert (found.kind if found else "") == kind
    assert [d.kind for d in bundle([("x", one)]).unlike(bundle([("x", other)]))] == ([kind] if kind else [])


def test_structure_comes_before_values() -> None:
    one = [("a", torch.zeros(1)), ("b", torch.zeros(1))]
    other = [("a", torch.ones(1)), ("c", torch.zeros(1))]
    assert [(d.path, d.detail) for d in compare(one, other)] == [("c", "missing"), ("b", "not expected")]
    assert [d.kind for d in compare(one, one[::-1])] == ["structure"]
    twice = [("a", torch.zeros(1)), ("a", torch.zeros(1))]
    assert [d.kind for d in compare(twice, twice[:1])] == ["structure"]


# ---- bundles


LEAVES = st.lists(st.one_of(tensors(), st.integers(0, 2), st.sampled_from([None, "a", 0.5])), max_size=5)


@given(LEAVES)
def test_a_bundle_gives_back_what_went_in(leaves: list[object]) -> None:
    pairs = [(f"leaf {n}", leaf) for n, leaf in enumerate(leaves)]
    assert compare(bundle(pairs).leaves(), pairs) == []


@given(LEAVES, st.data())
def test_a_bundle_agrees_with_comparing_leaf_by_leaf(leaves: list[object], data: st.DataObject) -> None:
    pairs = [(f"leaf {n}", leaf) for n, leaf in enumerate(leaves)]
    others = list(pairs)
    for n in data.draw(st.sets(st.integers(0, max(0, len(pairs) - 1)), max_size=2)):
        if n < len(pairs):
            others[n] = (f"leaf {n}", data.draw(LEAVES.filter(bool))[0])
    assert bundle(pairs).unlike(bundle(others)) == compare(pairs, others)


def test_a_bundle_is_a_copy() -> None:
    tensor = torch.zeros(3)
    for leaves in ([("x", tensor)], [("x", tensor), ("y", torch.zeros(2))]):
        held = bundle(leaves)
        tensor.add_(1)
        assert len(held.unlike(bundle(leaves))) == 1
    held.leaves()[0][1].add_(1)
    assert same(held.leaves()[0][1], tensor - 1)


def test_a_bundle_knows_where_its_bytes_belong() -> None:
    """Two bundles with one stream of bytes, cut at different places."""
    ten = torch.arange(10, dtype=torch.uint8)
    one = bundle([("a", ten[:4]), ("b", ten[4:])])
    other = bundle([("a", ten[:6]), ("b", ten[6:])])
    assert torch.equal(one.data[0], other.data[0])
    assert [d.kind for d in one.unlike(other)] == ["shape", "shape"]
    renamed = replace(one, paths=("a", "c"))
    assert [d.kind for d in one.unlike(renamed)] == ["structure", "structure"]


def test_a_bundle_finds_what_its_own_shortcut_would_miss() -> None:
    """The shortcut compares kinds and bytes; a tensor and a plain leaf in each other's place share both counts."""
    one: Bundle = bundle([("a", torch.zeros(1)), ("b", 1)])
    other: Bundle = bundle([("a", 1), ("b", torch.zeros(1))])
    assert [d.kind for d in one.unlike(other)] == ["structure", "structure"]


# ---- words


def test_a_difference_says_how_much_where_and_how_far() -> None:
    one = torch.zeros(8)
    one[3] = math.nan
    one[5] = struct.unpack("f", struct.pack("i", 2))[0]
    found = difference("heads.box", one, torch.zeros(8))
    assert str(found) == "heads.box: 2 of 8 elements (25 %), first at [3], at most 2143289344 ULP at [3]"
    assert str(difference("n", 1, 2)) == "n: int 1, expected int 2"
    assert str(difference("n", torch.zeros(2), torch.zeros(3))) == "n: (2,), expected (3,)"
    assert str(difference("n", torch.zeros(2), None)) == "n: a tensor of shape (2,), expected NoneType None"
