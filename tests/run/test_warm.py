"""What must not be forked, and what is missing."""

import threading
from pathlib import Path

import pytest

from parity.run import warm

ZOOS = str(Path(__file__).parent / "fake_zoos")


def test_threads_are_a_danger():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        danger = warm.fork_danger("a test")
        assert danger.startswith("a test left threads running (")
        assert "such a process must not be forked" in danger
        Path(f"/proc/self/task/{thread.native_id}/comm").write_text("jemalloc_bg_thd")
        assert "jemalloc" not in warm.fork_danger("a test"), "an allocator's thread that survives a fork was taken for a danger"
    finally:
        stop.set()
        thread.join()


def test_an_open_driver_is_a_danger(monkeypatch):
    monkeypatch.setattr(warm.os, "readlink", lambda _: "/dev/null")
    assert "CUDA driver" not in warm.fork_danger("a test")
    monkeypatch.setattr(warm.os, "readlink", lambda _: "/dev/nvidia-uvm")
    monkeypatch.setattr(warm, "_SAFE_THREADS", _names_of_threads())
    assert warm.fork_danger("a test").startswith("a test asked the CUDA driver")


def _names_of_threads():
    """Those of this process: the test is not about them."""
    return {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}


def test_missing_zoos_are_remembered_with_the_command_that_brings_them():
    warmth = warm.load([ZOOS], ["fake", "absent", "needy", "rotten"])
    assert set(warmth.missing) == {"absent", "needy", "rotten"}
    assert "pip install no-such-package" in warmth.missing["absent"][1]


def test_for_a_few_rows_a_zoo_is_only_looked_for():
    warmth = warm.load([ZOOS], ["fake", "absent", "rotten"], whole=False)
    assert list(warmth.missing) == ["absent"]  # that it is rotten a row will find


@pytest.mark.parametrize("name", ["fake_judges", "fake_judges:nothing", "no_such_module:judge", "fake_judges:HERE"])
def test_a_judge_must_exist_and_be_callable(name):
    with pytest.raises(warm.SetupError, match="judge"):
        warm.resolve(name)


def test_unknown_zoos_are_refused():
    with pytest.raises(warm.SetupError, match="no zoo is called 'fakee'; near: fake"):
        warm.load([ZOOS], ["fakee"])
