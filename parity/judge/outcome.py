"""What a child process reports of a row: plain data, no tensors, no exceptions. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

INFERENCE_CHECKS: Final = (
    "eager_repeat", "input_dependence", "capture", "replay", "stale_guard", "poison", "churn", "interleave", "weights",
    "held_outputs", "inputs_untouched", "escape",
)  # fmt: skip

TRAINING_CHECKS: Final = (
    "eager_step", "capture", "loss", "outputs", "buffers", "gradients", "rng", "accumulation", "proof", "trajectory",
)  # fmt: skip

CLASSES: Final = ("exact", "one_ulp", "eager_noise", "float_rounding", "own_rng")

CAUSES: Final = (
    "host-sync", "h2d-copy", "d2h-copy", "data-dependent-shape", "python-branch", "python-counter", "host-state", "stale-constant",
    "stale-address", "side-stream", "output-aliasing", "input-mutation", "rng", "buffer-drift", "grad-accumulation", "dead-input",
    "autocast-cache", "autocast-backward", "grad-layout", "nondeterministic-kernel", "reduction-order", "unknown",
)  # fmt: skip

PROTOCOL: Final = 1  # raised when a check is added, dropped or means something else: certificates of another protocol are stale

NETWORK_ERRORS: Final = ("NetworkNeeded", "OfflineModeIsEnabled", "LocalEntryNotFoundError")  # by name: they are others' classes

STATUSES: Final = ("judged", "unavailable", "broken", "crashed", "timed_out", "out_of_memory")


@dataclass(frozen=True)
class Check:
    """One named property. ``status``: passed, failed, skipped (``detail`` says why). ``figures``: counts, paths, numbers."""

    name: str
    status: str
    detail: str = ""
    cause: str = ""
    where: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """One row, as seen by the process that ran it, or, where that process died, by its parent.

    ``status``: judged; or why there was nothing to judge. ``broken``: the row itself is at fault (its builder raised, a probe has a
    wrong shape, the module returns no tensor). ``seconds``: wall clock per phase. ``peak_memory``: bytes on the device.

    ``training``: of a training row, else empty. ``class`` (of CLASSES, empty where the row is not safe); ``proof``: the smallest set of
    conditions under which the arm has eager's bits; ``cause``: why it differs without them, empty if it does not; ``tensors``:
    gradients of the first batch, [differing, total]; ``sorting``: all tensors of the step by kind; ``max_ulp``, ``worst`` (a path);
    ``ops``: noisy ones, as text; ``p_value`` of the permutation test, or None; ``tried``: conditions with what still differed;
    ``quorum``: eager runs, and tensors that vary among them; ``trajectory``: steps, replays, and what differed; ``seam``,
    ``mechanism``: as declared.
    """

    row: str
    status: str
    checks: tuple[Check, ...] = ()
    message: str = ""
    probes: tuple[Mapping[str, Any], ...] = ()
    leaves: tuple[str, ...] = ()
    dead_leaves: tuple[str, ...] = ()
    captures: int = 0
    replays: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    peak_memory: int = 0
    seed: int = 0
    notes: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"{self.row}: status={self.status!r} is none of {', '.join(STATUSES)}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Raises ValueError for unknown or missing fields: evidence is read back by this."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"an outcome has no field {', '.join(unknown)}")
        values = dict(data)
        try:
            values["checks"] = tuple(Check(**c) for c in values.get("checks", ()))
            for name in ("probes", "leaves", "dead_leaves", "notes"):
                values[name] = tuple(values.get(name, ()))
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"not an outcome: {error}") from None
