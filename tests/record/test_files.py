"""What Ctrl-C may not part, by real signals; the atomic writes are driven through what writes them (test_evidence, test_report)."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from parity.record.files import unbroken

PRESS = signal.SIGINT


def test_ctrl_c_comes_when_all_is_done() -> None:
    done = []

    @unbroken()
    def write() -> None:
        for part in (1, 2):
            signal.raise_signal(PRESS)
            done.append(part)

    with pytest.raises(KeyboardInterrupt):
        write()
    assert done == [1, 2]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(PRESS)


def test_an_error_within_is_not_lost_to_it() -> None:
    @unbroken()
    def write(press: bool) -> None:
        if press:
            signal.raise_signal(PRESS)
        raise ValueError("disk")

    with pytest.raises(KeyboardInterrupt) as caught:
        write(press=True)
    assert isinstance(caught.value.__context__, ValueError)
    with pytest.raises(ValueError, match="disk"):
        write(press=False)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_somebody_decided_about_ctrl_c_stays(handler: signal.Handlers) -> None:
    before = signal.signal(PRESS, handler)
    try:
        with unbroken():
            assert signal.getsignal(PRESS) is handler
        assert signal.getsignal(PRESS) is handler
    finally:
        signal.signal(PRESS, before)


def test_a_thread_may_write_too() -> None:
    seen: list[Any] = []

    def write() -> None:
        with unbroken():
            seen.append(signal.getsignal(PRESS))

    usual = signal.getsignal(PRESS)
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert seen == [usual]
