"""``torch.cuda.CUDAGraph`` on the emulated device. torch's own ``torch.cuda.graph`` and ``make_graphed_callables`` work on top."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from parity.runtime.errors import CaptureRefused, StaleGraph
from parity.runtime.legality import WRONG_STREAM
from parity.runtime.source import user_line

from .addresses import POISON, DeadRead
from .generators import DEFAULT, Counter, Generator
from .memory import block_of
from .plans import Plan
from .state import STATE
from .streams import Stream, leave_scope_of
from .tape import Tape

_pools = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    """A token that several graphs may share. Memory of a pool is never reused here: sharing is accepted and changes nothing."""
    return (0, next(_pools))


class CUDAGraph:
    """Besides torch's methods: ``stale``, ``warnings``, ``refused``, ``owns``, ``poison``, ``collect``.

    A call that a CUDA graph cannot record raises CaptureRefused where it is made; work left on a side stream raises it at the end of
    the capture. Either way the device is as it was before the capture. ``stale`` lists what the last replay read after it had died.
    ``collect``, set before a capture, is handed every refusal instead, and the call goes on with the eager result: such a capture tells
    all reasons at once, and ends without a graph.
    Not here: reuse of memory within a pool, kernels on wrong streams (``warnings`` names operations known for them).
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self.invalidated: CaptureRefused | None = None
        self.warnings: list[str] = []
        self.refused: list[CaptureRefused] = []
        self.collect: Callable[[CaptureRefused], None] | None = None
        self._tape: Tape | None = None
        self._recording: Tape | None = None
        self._origin: Stream | None = None
        self._start = 0
        self._streams: set[Stream] = set()
        self._pool: Any = None
        self._generators: list[Counter] = []
        self._offsets: list[tuple[Counter, int, int]] = []
        self._raised_before: BaseException | None = None
        self._check_liveness = False

    # ------------------------------------------------------------ torch's methods
    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False) -> None:
        if capture_error_mode not in {"global", "thread_local", "relaxed"}:
            raise RuntimeError(f"Unknown capture error mode {capture_error_mode!r}. Expected `global`, `thread_local`, or `relaxed`")
        if self._tape is not None:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph. Call reset() first, or create a new one.")
        if STATE.graph is not None:
            raise RuntimeError("a capture is under way already: one at a time")
        if STATE.stream is STATE.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._pool = getattr(pool, "id", pool) or graph_pool_handle()
        self._check_liveness = check_input_liveness
        self._raised_before = sys.exc_info()[1]
        self.invalidated = None
        self.warnings, self.refused = [], []
        self._origin, self._streams = STATE.stream, set()
        self._origin.done += 1  # who waited before this does not belong to the capture
        self._start = self._origin.done
        self._offsets = [(c, c.seed, c.offset) for c in (DEFAULT.counter, *self._generators)]
        self._recording = Tape()
        STATE.graph = self

    def capture_end(self) -> None:
        """Raises CaptureRefused if the capture was invalidated, or if a side stream never came back."""
        if STATE.graph is not self or self._recording is None or self._origin is None:
            raise RuntimeError("capture_end was called on a graph that is not being captured")
        if STATE.stream is not self._origin:
            raise RuntimeError("Capture must end on the same stream it began on.")
        error = sys.exc_info()[1]
        failing = error is not None and error is not self._raised_before
        refusal = self.invalidated if failing else self.invalidated or self._unjoined(self._origin)
        stream = self._origin
        self._leave(keep=not failing and refusal is None and self.collect is None)
        if refusal is not None and self.collect is not None:
            self.collect(refusal)
            return
        if refusal is not None and not failing:  # an error on its way out tells more than ours
            leave_scope_of(stream)
            raise refusal

    def replay(self) -> None:
        if self._tape is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if STATE.graph is not None:
            raise RuntimeError("the emulated device does not record a replay inside a capture")
        if self._check_liveness and (dead := self._tape.dead()):
            raise StaleGraph(f"inputs of the graph were freed since its capture: {', '.join(map(str, dead))}")
        self._tape.replay()

    def reset(self) -> None:
        if STATE.graph is self:
            self.abort()
        self._tape = None

    def pool(self) -> Any:
        return self._pool

    def instantiate(self) -> None:
        """A tape needs none."""

    def enable_debug_mode(self) -> None:
        """A tape can always be inspected."""

    def register_generator_state(self, generator: Generator) -> None:
        if generator.counter not in self._generators:
            self._generators.append(generator.counter)

    # ------------------------------------------------------------ ours
    @property
    def stale(self) -> list[DeadRead]:
        return [] if self._tape is None else self._tape.stale

    @property
    def operations(self) -> int:
        """How many operations a replay runs."""
        return 0 if self._tape is None else len(self._tape)

    @property
    def owned_bytes(self) -> int:
        return 0 if self._tape is None else sum(owned.nbytes for owned in self._tape.owned.values())

    def owns(self, tensor: Tensor) -> bool:
        """Whether this graph's capture allocated the tensor's storage."""
        block = block_of(tensor)
        return block is not None and self._tape is not None and block.graph == self._tape.number

    def poison(self, pattern_byte: int = POISON) -> None:
        """Overwrites everything that the graph owns. Done with 0xFF on its own before anyone can look at what a capture computed."""
        if self._tape is not None:
            self._tape.seal()
            self._tape.poison(pattern_byte)

    # ------------------------------------------------------------ for the device
    @property
    def tape(self) -> Tape:
        """The tape of the capture under way."""
        assert self._recording is not None
        return self._recording

    def captures(self, stream: Stream) -> bool:
        """Whether a stream belongs to the capture: it is the origin, or it has waited for it since the capture began."""
        return stream is self._origin or (self._origin is not None and stream.seen.get(self._origin, -1) >= self._start)

    def launch(self, plan: Plan, stream: Stream) -> None:
        """An operation is recorded on a stream of the capture."""
        stream.done += 1
        if stream is not self._origin:
            stream.where = user_line()
            self._streams.add(stream)
        if plan.wrong_stream:
            line = user_line()
            self.warnings.append(
                f"{plan.name} launches kernels on the legacy default stream: a CUDA capture does not record them, and CUDA would not "
                f"replay what this device replays; at {line}"
            )
            if self.collect is not None:
                text = f"{plan.name} launches {WRONG_STREAM[plan.name]} on the legacy default stream"
                self.collect(CaptureRefused("side-stream", text, line))

    def foreign(self, name: str) -> None:
        """An operation ran on a stream that never joined the capture."""
        if self.collect is not None:
            self.collect(CaptureRefused("side-stream", f"{name} runs on a stream that never joined the capture", user_line()))

    def knows(self, counter: Counter) -> bool:
        """Whether the capture may draw from a generator. One that collects is told of a stranger, and goes on."""
        known = any(counter is c for c, _, _ in self._offsets)
        if known or self.collect is None:
            return known
        self.collect(CaptureRefused("rng", "a generator that is not registered with the graph", user_line()))
        self._offsets.append((counter, counter.seed, counter.offset))
        return True

    def abort(self) -> None:
        """Ends the capture under way and keeps nothing."""
        self._leave(keep=False)

    def _unjoined(self, origin: Stream) -> CaptureRefused | None:
        for stream in self._streams:
            if origin.seen.get(stream, -1) < stream.done:
                return CaptureRefused("side-stream", "a side stream has work that the capturing stream never waited for", stream.where)
        return None

    def _leave(self, keep: bool) -> None:
        assert self._recording is not None
        assert self._origin is not None
        tape, self._recording = self._recording, None
        self._origin = None
        STATE.graph = None
        self._raised_before = self.invalidated = None  # errors hold frames, and frames hold tensors
        for counter, seed, offset in self._offsets:  # a capture draws nothing: the first replay goes on where eager was
            counter.seed, counter.offset = seed, offset
        if keep:
            tape.undo()
            tape.finish()
            self._tape = tape
        else:
            tape.drop()
