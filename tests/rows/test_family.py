"""Declarations: which rows a family has, what is expected of them, and what is refused where it is declared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parity.rows.family import Expect, Family, Input, Subject
from parity.rows.row import Row, Settings


def _never(*_: Any) -> Any:
    raise AssertionError("a declaration builds nothing")


def family(**more: Any) -> Family:
    return Family("zoo", "family", "detect", _never, _never, **more)


def test_rows_arm_by_arm_recommended_size_first() -> None:
    rows = family(sizes=(64, 640), arms=("bare", "native"), boundaries=("", "whole")).rows()
    assert [str(r.settings) + " " + r.arm for r in rows] == [
        "64px-b1-float32 bare",
        "64px-b1-float32 native",
        "64px-b1-float32-whole bare",
        "640px-b1-float32 bare",
        "640px-b1-float32 native",
        "640px-b1-float32-whole bare",
    ]


@pytest.mark.parametrize("sizes", [(), (64, 64)])
def test_each_size_once(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"zoo/family/detect: sizes=.* must name each size once"):
        family(sizes=sizes)


@pytest.mark.parametrize("more", [{"arms": ("lazy",)}, {"boundaries": ("a/b",)}, {"dtype": "torch.float32"}, {"sizes": (-1,)}])
def test_a_family_whose_rows_could_have_no_id_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"lazy|not the settings"):
        family(**more)


@pytest.mark.parametrize("reason", ["", "FIXME", "known issue"])
def test_an_expectation_needs_a_reason(reason: str) -> None:
    with pytest.raises(ValueError, match="needs a reason that a stranger understands"):
        Expect("wrong", reason)


def test_which_expectation_holds() -> None:
    everywhere = Expect("wrong", "holds for whoever asks")
    old = Expect("wrong", "holds for the old version", version="1.6")
    cuda = Expect("wrong", "holds on a device only", engines=("cuda",))
    whole = Expect("wrong", "holds for the whole forward", boundary="whole")
    declared = family(boundaries=("", "whole"), expected={"bare": (old, cuda, whole), "native": (everywhere,)})
    row = Row("zoo", "family", "detect", arm="bare")
    uncut = Row("zoo", "family", "detect", settings=Settings(boundary="whole"), arm="bare")
    assert declared.expectation(row, "emulated", "1.6.3") is old
    assert declared.expectation(row, "emulated", "1.7.0") is None
    assert declared.expectation(row, "cuda", "1.7.0") is cuda
    assert declared.expectation(uncut, "emulated", "1.7.0") is whole
    assert declared.expectation(row.with_arm("graphed"), "cuda", "1.6.3") is None
    assert declared.expectation(row.with_arm("native"), "cuda", "") is everywhere


def test_a_subject_is_moved_by_its_own_way_or_its_module() -> None:
    module = torch.nn.Linear(1, 1)
    moved: list[torch.device] = []
    device = torch.device("meta")
    own = Subject(module, module, place=moved.append)
    assert own.to(device) is own
    assert moved == [device]
    assert next(module.parameters()).device.type == "cpu"
    Subject(module, module).to(device)
    assert next(module.parameters()).device == device


def test_an_input_is_plain_data() -> None:
    assert Input((1, 2)) == Input((1, 2), 0.0, 1.0, "float32")
