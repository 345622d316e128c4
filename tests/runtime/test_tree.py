"""Any nesting of tensors, flat and back, with a path for every leaf."""

from __future__ import annotations

import enum
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from parity.runtime import tree

Pair = namedtuple("Pair", ["box", "score"])


@dataclass
class Inner:
    values: list[Any]


@dataclass(frozen=True)
class Outer:
    logits: Any
    inner: Inner
    name: str = "plain"
    derived: int = field(default=3, init=False)


class Record(OrderedDict[str, Any]):
    """As a zoo's output class: items, and an attribute beside them."""

    note: Any = None


class Open(dict[str, Any]):
    """Its items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Colour(enum.Enum):
    RED = 1


class Foreign:
    pass


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Dataclasses are registered with torch's pytree for good; not by these tests."""
    yield
    for kind in (Inner, Outer, Record, Open, UserDict, SimpleNamespace):
        pytree.SUPPORTED_NODES.pop(kind, None)


LEAVES = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.builds(torch.zeros, st.integers(0, 2)))
NESTINGS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=3).map(Record),
        st.builds(Outer, inner, st.builds(Inner, st.lists(inner, max_size=2))),
    ),
    max_leaves=8,
)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one is other
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(_alike(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, Outer | Inner):
        return type(one) is type(other) and all(_alike(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    return type(one) is type(other) and one == other


@given(NESTINGS)
def test_a_nesting_comes_back_from_its_leaves(value: Any) -> None:
    leaves, spec = tree.flatten(value)
    assert _alike(tree.unflatten(leaves, spec), value)
    assert tree.flatten(value)[1] == spec


@given(NESTINGS)
def test_paths_name_the_leaves_in_their_order(value: Any) -> None:
    named = tree.paths(value)
    assert all(a is b for (_, a), b in zip(named, tree.flatten(value)[0], strict=True))
    assert len({path for path, _ in named}) == len(named)


def test_a_wrong_answer_is_found() -> None:
    one, other = torch.zeros(1), torch.zeros(1)
    assert not _alike([one], [other])
    assert not _alike(Outer(one, Inner([])), Outer(one, Inner([one])))
    assert tree.flatten([one])[1] != tree.flatten((one,))[1]
    assert tree.flatten({"a": one})[1] != tree.flatten({"b": one})[1]


def test_paths_as_they_stand_in_reports() -> None:
    a, b = torch.zeros(1), torch.zeros(1)
    value = {"predictions": a, "x8": Pair(b, 3), "more": [(a,), Outer(b, Inner([a]))]}
    assert [p for p, _ in tree.paths(value)] == [
        "predictions",
        "x8.box",
        "x8.score",
        "more[0][0]",
        "more[1].logits",
        "more[1].inner.values[0]",
        "more[1].name",
        "more[1].derived",
    ]
    assert tree.paths(a) == [("output", a)]
    assert tree.paths(3, "input") == [("input", 3)]
    assert [p for p, _ in tree.paths((a, b), "")] == ["[0]", "[1]"]
    assert [p for p, _ in tree.paths(OrderedDict(a=1, b=2))] == ["a", "b"]


def test_what_might_hide_tensors_is_told_by_its_type() -> None:
    plain = [
        torch.zeros(1),
        None,
        True,
        1,
        0.5,
        1j,
        "a",
        b"b",
        torch.float32,
        torch.device("cpu"),
        torch.Size([1]),
        slice(1),
        Colour.RED,
    ]
    assert tree.opaque(plain) == []
    assert tree.opaque([*plain, Foreign(), {1}, Foreign()]) == [Foreign, set]
    assert tree.opaque(tree.flatten(Outer(1, Inner([2])))[0]) == []


def test_a_dataclass_comes_back_with_what_is_no_field() -> None:
    @dataclass
    class Boxes:
        xy: torch.Tensor

        def __post_init__(self) -> None:
            self.area = self.xy * 2

    leaves, spec = tree.flatten(Boxes(torch.ones(2)))
    assert [tuple(x.tolist()) for x in leaves] == [(1, 1), (2, 2)]
    back = tree.unflatten([torch.zeros(2), torch.full((2,), 3.0)], spec)
    assert back.area.tolist() == [3, 3]


def test_kinds_of_dict_and_namespaces_come_back_as_they_are() -> None:
    record = Record(logits=torch.zeros(1))
    record.note = torch.ones(1)
    value = {"a": record, "b": Open(x=torch.ones(2)), "c": SimpleNamespace(y=[torch.ones(3)]), "d": UserDict(z=torch.ones(4))}
    leaves, spec = tree.flatten(value)
    assert [len(x) for x in leaves] == [1, 1, 2, 3, 4]
    assert [path for path, _ in tree.paths(value)] == ["a.logits", "a.note", "b.x", "c.y[0]", "d.data.z"]
    new = [x + 1 for x in leaves]
    back = tree.unflatten(new, spec)
    assert {k: type(v) for k, v in back.items()} == {k: type(v) for k, v in value.items()}
    assert back["a"]["logits"] is new[0]
    assert back["a"].note is new[1]
    assert back["b"].x is new[2]
    assert back["b"]["x"] is new[2]
    assert back["c"].y[0] is new[3]
    assert back["d"]["z"] is new[4]
    assert tree.opaque(leaves) == []
    assert tree.flatten({**value, "b": Open(w=torch.ones(2))})[1] != spec


def test_whether_a_value_still_is_of_its_leaves() -> None:
    value = {"a": [torch.ones(1), 2]}
    leaves, spec = tree.flatten(value)
    assert tree.alike(value, leaves, spec)
    value["a"][0] = torch.ones(1)
    assert not tree.alike(value, leaves, spec)
    value["a"] = leaves[:1]
    assert not tree.alike(value, leaves, spec)


def test_a_size_is_a_leaf_and_comes_back_as_one() -> None:
    leaves, spec = tree.flatten((torch.ones(2), torch.Size([2, 3])))
    assert leaves[1] == (2, 3)
    assert type(tree.unflatten(leaves, spec)[1]) is torch.Size
    assert [path for path, _ in tree.paths({"size": torch.Size([2, 3])})] == ["size"]


def test_numbers_of_numpys_and_ranges_hide_no_tensor() -> None:
    assert tree.opaque([np.int64(3), np.float32(2), np.bool_(True), range(3)]) == [np.bool_]
