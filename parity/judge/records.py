"""What a call leaves behind, and the eager arm's record of the whole script."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from parity.judge import census
from parity.judge.bits import Bundle, Difference, bundle
from parity.judge.script import INFERENCE, SEQUENCE, Step
from parity.judge.subject import Bench, BrokenRow, blamed, seed_everything
from parity.rows.family import Subject
from parity.runtime import tree
from parity.runtime.engine import DEVICE, on_device


@dataclass(frozen=True)
class Record:
    """What one call left behind, copied: output leaves, buffers, inputs afterwards, the device generator's state."""

    outputs: Bundle
    buffers: Bundle
    inputs: Bundle
    random: Bundle
    kernels: dict[str, int] | None = None

    def unlike(self, other: Record) -> list[Difference]:
        pairs = ((self.outputs, other.outputs), (self.buffers, other.buffers), (self.random, other.random), (self.inputs, other.inputs))
        return [d for mine, theirs in pairs for d in mine.unlike(theirs)]


@dataclass(frozen=True)
class Reference:
    """Eager's records, one per call of the script, and what they say about the row before any graph."""

    records: list[Record]
    noise: list[Difference]
    leaves: tuple[str, ...]
    dead: tuple[str, ...]
    probes: list[dict[str, Any]]
    patch: dict[str, Tensor] = field(default_factory=dict)
    sensitized: bool = False

    @property
    def fit(self) -> bool:
        """Whether an arm can be judged against it."""
        return not self.noise and len(self.dead) < len(self.leaves)


def snapshot(bench: Bench, value: Any, root: str = "output") -> Bundle:
    """The leaves of any nesting, copied where nothing sees it."""
    with bench.engine.quiet():
        return bundle(tree.paths(value, root))


def record(bench: Bench, subject: Subject, output: Any, args: Any) -> Record:
    """Raises BrokenRow for an output that hides tensors."""
    if foreign := tree.opaque(tree.flatten(output)[0]):
        name = foreign[0].__qualname__
        raise BrokenRow(f"the forward returns a {name}, whose tensors cannot be seen: register it with torch's pytree")
    with bench.engine.quiet():
        buffers = bundle([(f"buffer {name}", buffer) for name, buffer in subject.module.named_buffers()])
        inputs = bundle([(f"input {path}", leaf) for path, leaf in tree.paths(args, "")])
        random = bundle([("generator", torch.cuda.get_rng_state())])
    return Record(snapshot(bench, output), buffers, inputs, random)


def steps(bench: Bench, script: tuple[Step, ...]) -> list[Step]:
    return [s for s in script if bench.variant(s.variant) is not None]


@contextlib.contextmanager
def around(bench: Bench) -> Iterator[None]:
    with bench.family.context(DEVICE) if bench.family.context is not None else contextlib.nullcontext():
        yield


def forward(bench: Bench, call: Callable[..., Any], step: Step) -> tuple[Any, Any]:
    args = bench.args(step.probe, step.variant)
    with blamed(lambda: f"the forward, for inputs {[tuple(x.shape) for x in tree.flatten(args)[0] if isinstance(x, Tensor)]},"):
        output = call(*args)
        torch.cuda.synchronize()  # what a side stream still writes is part of what the call left behind
    return output, args


def scale(module: nn.Module) -> tuple[int, list[str]]:
    """Every floating-point parameter and device buffer, in place, by a factor of 0.9 to 1.1 that its name decides; positive, so that
    variances stay so. Returns how many were scaled and which buffers were left alone (integer, bool, host)."""
    left: list[str] = []
    scaled = 0
    with torch.no_grad():
        named = [(n, p, True) for n, p in module.named_parameters()] + [(n, b, False) for n, b in module.named_buffers()]
        for name, tensor, is_parameter in named:
            if not tensor.is_floating_point() or not (is_parameter or on_device(tensor)):
                left.append(name)
                continue
            fraction = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
            tensor.mul_(0.9 + 0.2 * fraction)
            scaled += 1
    torch.clear_autocast_cache()  # where a row keeps autocast open, eager would go on with casts of the old weights
    return scaled, left


def record_eager(bench: Bench, subject: Subject, *, whole: bool) -> list[Record]:
    """The records of an eager arm: the whole script, or only its opening sequence."""
    call = subject.compose(subject.region)
    records: list[Record] = []
    seed_everything(bench.seed)
    with around(bench):
        for step in steps(bench, INFERENCE if whole else SEQUENCE):
            if step.action == "scale":
                scale(subject.module)
            if not step.is_call:
                continue
            profile = census.Kernels() if step.profiled and whole and bench.engine.certifies else None
            if profile is not None:
                profile.start()
            output, args = forward(bench, call, step)
            kernels = census.tally(profile.stop()) if profile is not None else None
            records.append(replace(record(bench, subject, output, args), kernels=kernels))
            between(bench, subject, step)
    return records


def between(bench: Bench, subject: Subject, step: Step) -> None:
    if bench.family.between is not None and step.check == "replay":
        bench.family.between(subject.module)
