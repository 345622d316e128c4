"""What an exception of a row comes to, without any process."""

import pytest

from parity.rows.row import Row
from parity.run import worker
from parity.run.worker import NetworkNeeded, outcome_of

ROW = Row("zoo", "family", "detect")


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


class LocalEntryNotFoundError(ValueError):
    """As huggingface_hub calls its own."""


def _raised(error, cause=None):
    try:
        raise error from cause
    except BaseException as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), "out_of_memory"),
        (OutOfMemoryError("Tried to allocate"), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (NetworkNeeded("it asked for example.org"), "unavailable"),
        (LocalEntryNotFoundError("no such file in the cache"), "unavailable"),
        (ValueError("wrong shape"), "broken"),
        (SystemExit(1), "broken"),
    ],
)
def test_status(error, status):
    assert outcome_of(ROW, _raised(error)).status == status


def test_a_network_error_is_found_behind_the_one_that_a_library_raised_instead():
    outcome = outcome_of(ROW, _raised(OSError("could not load weights"), NetworkNeeded("it asked for example.org")))
    assert outcome.status == "unavailable"
    assert outcome.message.startswith("row needs the network: it asked for example.org (at ")


def test_an_exception_that_causes_itself_ends():
    error = _raised(ValueError("a circle"))
    error.__cause__ = error
    assert outcome_of(ROW, error).status == "broken"


def test_the_line_is_the_users_own():
    assert f"{__file__}:" in outcome_of(ROW, _raised(ValueError("wrong shape"))).message


def test_a_line_of_the_standard_library_is_not_the_users():
    with pytest.raises(ValueError, match="Expecting") as caught:
        worker.json.loads("no json")
    assert f"(at {__file__}:" in outcome_of(ROW, caught.value).message
