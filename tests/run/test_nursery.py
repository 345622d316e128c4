"""How ends and last words are put."""

import signal

import pytest

from parity.run.nursery import LAST_LINES, last_lines
from parity.run.nursery import how_it_ended as ended


@pytest.mark.parametrize("killer", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_from_outside(killer):
    assert ended(killer) == (f"the child was ended from outside, by {killer.name}: by a person, or by a kernel short of host memory")


def test_other_ends():
    assert ended(signal.SIGABRT) == "the child died of SIGABRT"
    assert ended(7 << 8) == "the child left by itself, with exit code 7"


def test_last_lines_begin_after_the_offset(tmp_path):
    log = tmp_path / "log"
    log.write_text("of an earlier row\nof this row\n\n")
    assert last_lines(log, len("of an earlier row\n")) == "of this row"
    assert last_lines(tmp_path / "none") == ""


def test_last_lines_are_few_and_short(tmp_path):
    log = tmp_path / "log"
    log.write_text("x" * 100_000 + "\n" + "".join(f"line {n}\n" for n in range(100)))
    assert last_lines(log).splitlines() == [f"line {n}" for n in range(100 - LAST_LINES, 100)]
    log.write_text("y" * 1000)
    assert len(last_lines(log)) == 240


def test_a_stack_dump_is_kept_from_its_top(tmp_path):
    log = tmp_path / "log"
    stack = [f'  File "model.py", line {n} in forward' for n in range(30)]
    log.write_text("\n".join(["chatter", "Fatal Python error: Aborted", "Current thread", *stack]))
    assert last_lines(log).splitlines() == ["Fatal Python error: Aborted", "Current thread", *stack[: LAST_LINES - 2]]
