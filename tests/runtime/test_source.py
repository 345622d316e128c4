"""Which line is the user's own: not torch's, not ours."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parity.runtime.source import describe, error_line, user_line


def test_the_callers_line_with_its_code() -> None:
    line = user_line()  # this one
    assert line.endswith("line = user_line()  # this one")
    assert line.startswith("tests/runtime/test_source.py:")


def test_torchs_frames_are_looked_through() -> None:
    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(user_line(sys._getframe(1)))
            return func(*args, **(kwargs or {}))

    with Spy():
        torch.nn.functional.interpolate(torch.zeros(1, 1, 2, 2), scale_factor=2)
    assert seen
    assert all("torch.nn.functional.interpolate" in line for line in seen)


def test_an_errors_innermost_line_of_the_users() -> None:
    def fails() -> None:
        torch.zeros(2) @ torch.zeros(3)  # here

    with pytest.raises(RuntimeError) as caught:
        fails()
    assert error_line(caught.value).endswith("# here")
    assert error_line(ValueError("never raised")) == ""


def test_files_are_named_from_where_they_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.py"
    file.write_text("a = 1\nb = a  \n")
    monkeypatch.chdir(tmp_path)
    describe.cache_clear()
    assert describe(str(file), 2) == "model.py:2 b = a"
    assert describe(str(file), 9) == "model.py:9"
    elsewhere = os.sep.join(["", "env", "lib", "site-packages", "zoo", "net.py"])
    assert describe(elsewhere, 3) == os.path.join("zoo", "net.py") + ":3"
    describe.cache_clear()


def test_frames_of_pythons_own_library_are_looked_through() -> None:
    class Told:
        def __deepcopy__(self, memo: object) -> str:
            return user_line(sys._getframe(1))

    assert "copy.deepcopy([Told()])" in copy.deepcopy([Told()])[0]
