"""Why a capture failed: CUDA names no cause, so the traced call before it does."""

from __future__ import annotations

from parity.runtime.errors import CaptureRefused
from parity.runtime.liveness import Trace
from parity.runtime.source import error_line

_MESSAGES = (  # what CUDA and torch say, and what it means; the traced call is asked first
    ("cannot copy between cpu and cuda", "h2d-copy"),
    ("unjoined work", "side-stream"),
    ("dependency created on uncaptured work", "side-stream"),
    ("would make the legacy stream depend", "side-stream"),
    ("offset increment outside graph capture", "rng"),
    ("registered generator", "rng"),
    ("does not know the generator", "rng"),
    ("set_current_seed can be called during stream capture", "rng"),
    ("cannot call cudageneratorimpl", "rng"),
    ("not permitted when stream is capturing", "host-sync"),
    ("use_reentrant=true", "host-state"),
)


def chain(error: BaseException) -> list[BaseException]:
    """An exception and what it came from, the first cause first."""
    found: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in found:
        found.append(link)
        link = link.__cause__ or link.__context__
    return found[::-1]


def explain(error: BaseException, traced: Trace | None) -> CaptureRefused:
    """The refusal behind an exception raised by a capture.

    The line is the one the first exception passed through. The cause is that of the traced violation on that line, else another
    stream that the line ran on, else that of the first violation, else what the message means, else ``unknown``.
    """
    links = chain(error)
    for link in links:
        if isinstance(link, CaptureRefused) and link.cause != "unknown":
            return link
    where = next((line for line in map(error_line, links) if line), "")
    violations = traced.violations if traced is not None else []
    text = _first_line(links[0])
    here = next((v for v in violations if v[1] == where), None)
    if here is None and traced is not None and where in traced.aside:
        return CaptureRefused("side-stream", f"on a stream that did not join the capture: {text}", where)
    found = here or next(iter(violations), None)
    if found is not None:
        return CaptureRefused(found[0].cause, f"{found[0].what}: {text}", found[1] or where)
    for words, cause in _MESSAGES:
        if any(words in str(link).lower() for link in links):
            return CaptureRefused(cause, text, where)
    return CaptureRefused("unknown", text, where)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
