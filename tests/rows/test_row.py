"""Row ids: one string that says everything, there and back."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.rows.row import ARMS, MODES, Row, Settings

SETTINGS = st.builds(
    Settings,
    st.integers(0, 10_000),
    st.integers(0, 512),
    st.sampled_from(["float32", "float16", "bfloat16", "float64", "float8_e4m3fn"]),
    st.sampled_from(["", "whole", "backbone"]),
)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="/", exclude_categories=("Z", "C")), min_size=1, max_size=8)
ROWS = st.builds(Row, WORDS, WORDS, WORDS, st.sampled_from(MODES), SETTINGS, st.sampled_from(ARMS))


@given(SETTINGS)
def test_settings_come_back_from_their_text(settings: Settings) -> None:
    assert Settings.parse(str(settings)) == settings


@given(ROWS)
def test_a_row_comes_back_from_its_id(row: Row) -> None:
    assert Row.parse(row.id) == row
    assert str(row) == row.id


@given(ROWS, ROWS)
def test_two_rows_never_share_an_id(one: Row, other: Row) -> None:
    assert (one.id == other.id) == (one == other)
    assert (one.subject == other.subject) == (one == other.with_arm(one.arm))


@given(ROWS)
def test_arms_of_one_subject(row: Row) -> None:
    for arm in ARMS:
        assert row.with_arm(arm).subject == row.subject
        assert row.with_arm(arm).id == f"{row.subject}/{arm}"


def test_ids_as_they_stand_in_reports() -> None:
    assert Row("libreyolo", "yolo9", "detect", settings=Settings(256)).id == "libreyolo/yolo9/detect/inference/256px-b1-float32/graphed"
    assert str(Settings(0, 2, "bfloat16", "whole")) == "b2-bfloat16-whole"


@pytest.mark.parametrize(
    "text", ["", "b1", "256-b1-float32", "px-b1-float32", "b1-float32-", "b1-float32-a-b", "B1-float32", " b1-float32"]
)
def test_what_no_settings_are(text: str) -> None:
    with pytest.raises(ValueError, match=r"not the settings of a row: .*256px-b1-float32"):
        Settings.parse(text)


@pytest.mark.parametrize(
    "values", [{"size": -1}, {"batch": -1}, {"dtype": "Float"}, {"dtype": "a-b"}, {"boundary": "Whole"}, {"boundary": "a/b"}]
)
def test_settings_that_could_not_be_read_back_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not the settings of a row"):
        Settings(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "a/b/c", "a/b/c/inference/b1-float32", "a/b/c/inference/b1-float32/bare/d"])
def test_what_no_row_id_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a row id: .*zoo/family/task/mode/settings/arm"):
        Row.parse(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"zoo": ""}, "zoo=''"),
        ({"family": "a/b"}, "family='a/b'"),
        ({"task": "a b"}, "task='a b'"),
        ({"task": "a\nb"}, "task="),
        ({"mode": "test"}, "mode='test' is none of inference, training"),
        ({"arm": "lazy"}, "arm='lazy' is none of eager, bare, graphed, native"),
    ],
)
def test_parts_that_cannot_stand_in_an_id(values: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Row(**{"zoo": "z", "family": "f", "task": "t", **values})


def test_a_row_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Row("z", "f", "t").zoo = "other"  # type: ignore[misc]
