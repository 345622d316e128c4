"""Why a capture failed: the traced call first, then what the message means, then nobody knows."""

from __future__ import annotations

import pytest

from parity.runtime.errors import CaptureRefused, NotCertified, ParityError, StaleGraph
from parity.runtime.legality import Violation
from parity.runtime.liveness import Trace
from parity.runtime.refusal import chain, explain


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.", "h2d-copy"),
        ("CUDA error: capturing stream has unjoined work", "side-stream"),
        ("CUDA error: dependency created on uncaptured work in another stream", "side-stream"),
        ("operation would make the legacy stream depend on a capturing blocking stream", "side-stream"),
        ("Offset increment outside graph capture encountered unexpectedly.", "rng"),
        ("CUDA error: operation not permitted when stream is capturing", "host-sync"),
        ("When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad()", "host-state"),
        ("something that nobody has seen", "unknown"),
        ("", "unknown"),
    ],
)
def test_what_a_message_means(message: str, cause: str) -> None:
    found = explain(raised(RuntimeError(message)), None)
    assert found.cause == cause
    assert found.message == f"RuntimeError: {message}"
    assert "test_refusal.py:" in found.where
    assert found.where in str(found)


def test_the_first_error_of_a_chain_is_the_one_that_is_told() -> None:
    first = raised(RuntimeError("operation not permitted when stream is capturing\nmore lines"))
    later = raised(ValueError("capture invalidated"), first)
    found = explain(later, None)
    assert (found.cause, found.message) == ("host-sync", "RuntimeError: operation not permitted when stream is capturing")


def test_a_refusal_that_knows_its_cause_stays_itself() -> None:
    refusal = CaptureRefused("d2h-copy", "copies", "m.py:1 x.cpu()")
    assert explain(raised(RuntimeError("unjoined work"), refusal), None) is refusal
    unknowing = CaptureRefused("unknown", "capture failed")
    assert explain(raised(RuntimeError("unjoined work"), unknowing), None).cause == "side-stream"


def test_the_traced_call_on_the_line_comes_first() -> None:
    error = raised(RuntimeError("operation not permitted when stream is capturing"))
    where = explain(error, None).where
    trace = Trace(
        violations=[(Violation("h2d-copy", "copies from the host"), "other.py:3"), (Violation("d2h-copy", "copies to it"), where)]
    )
    found = explain(error, trace)
    assert (found.cause, found.where) == ("d2h-copy", where)
    assert found.message.startswith("copies to it: RuntimeError: ")
    trace.violations.pop()
    assert (explain(error, trace).cause, explain(error, trace).where) == ("h2d-copy", "other.py:3")


def test_a_line_on_another_stream_is_told_before_what_the_message_means() -> None:
    """Memory for a stream that is not captured may not be asked for: CUDA says no more than "not permitted"."""
    error = raised(RuntimeError("operation not permitted when stream is capturing"))
    where = explain(error, None).where
    elsewhere = [(Violation("h2d-copy", "copies from the host"), "other.py:3")]
    assert explain(error, Trace(violations=elsewhere, aside={where})).cause == "side-stream"
    assert explain(error, Trace(violations=[(Violation("d2h-copy", "copies to it"), where)], aside={where})).cause == "d2h-copy"
    assert explain(error, Trace(violations=elsewhere, aside={"other.py:9"})).cause == "h2d-copy"


def test_a_chain_goes_from_the_first_cause_and_ends() -> None:
    first, second = ValueError("first"), KeyError("second")
    second.__context__ = first
    third = raised(RuntimeError("third"), second)
    assert chain(third) == [first, second, third]
    first.__cause__ = third
    assert len(chain(third)) == 3


def test_errors_are_what_callers_catch() -> None:
    refusal = CaptureRefused("rng", "draws", "m.py:2 x")
    assert str(refusal) == "draws [rng at m.py:2 x]"
    assert str(CaptureRefused("rng", "draws")) == "draws [rng]"
    assert issubclass(NotCertified, NotImplementedError)
    assert all(issubclass(e, ParityError) for e in (CaptureRefused, NotCertified, StaleGraph))
    assert issubclass(CaptureRefused, RuntimeError)
