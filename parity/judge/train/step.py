"""One training step from one saved state, and what it leaves behind."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from parity.judge.bits import Bundle, Difference, bundle
from parity.judge.counterfactual.conditions import EagerTwist
from parity.judge.subject import AnyBench, BrokenRow, apart, blamed, state
from parity.judge.train.seam import Seam, as_static
from parity.rows.training import Training, TrainSubject
from parity.runtime import rng, tree
from parity.runtime.engine import DEVICE
from parity.runtime.invalidation import generators
from parity.runtime.memory import Memory

SCALE = 1024.0
"""The fixed loss scale of float16, so that no step depends on what a scaler saw before."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass
class TrainBench(AnyBench[TrainSubject]):
    """Of a training row. ``first``: parameters and buffers of the first build, on the host, which all others have to be like."""

    family: Training
    first: dict[str, Tensor] | None = None
    kind = TrainSubject

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.row.settings.dtype)
        return found

    @property
    def scale(self) -> float:
        return SCALE if self.dtype == torch.float16 else 1.0

    def checked(self, module: nn.Module) -> None:
        lazy = next((name for name, t in state(module).items() if is_lazy(t)), "")
        if lazy:
            raise BrokenRow(f"{lazy} has no shape yet, so that nothing can be compared: let build() call the lazy module once")
        made = {name: tensor.detach().cpu() for name, tensor in state(module).items()}
        if self.first is None:
            self.first = {name: tensor.clone() for name, tensor in made.items()}
        elif (name := apart(made, self.first)) is not None:
            raise BrokenRow(f"build() is not deterministic: two builds with seed {self.seed} differ in {name}; draw from torch's "
                            "default generator, which is seeded before each build")  # fmt: skip

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Whatever a case file wants around a whole arm."""
        with self.family.context(DEVICE) if self.family.context is not None else contextlib.nullcontext():
            yield

    def variant(self, name: str) -> bool:
        """Whether there are batches of another size, or of another length ('odd')."""
        return self.family.probes is None and (name != "size" or self.family.other_size is not None)

    def _made(self, probe: str, variant: str) -> tuple[Any, ...]:
        """One batch. ``variant``: '' the row's own shape; 'size': the other size; 'odd': one sample less, or more where there is but
        one."""
        settings = self.row.settings
        if variant == "size":
            settings = replace(settings, size=self.family.other_size or 0)
        elif variant == "odd":
            settings = replace(settings, batch=settings.batch - 1 if settings.batch > 1 else 2)
        with self.engine.quiet(), blamed(lambda: "draw(settings, probe, seed)"):
            made = self.family.draw(settings, probe, self.seed)
        if not isinstance(made, tuple):
            raise BrokenRow(f"draw(settings, probe, seed) must return one batch as a tuple, not a {type(made).__name__}")
        return made


class State:
    """Parameters, buffers, plain attributes, those in containers too, and every random stream, as they are. What a later call builds
    lazily stays where it is."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (own, dict(own)) for m in module.modules() for own in (m._parameters, m._buffers)
        ]
        self._plain = [(m, {k: v for k, v in vars(m).items() if type(v) in _PLAIN}) for m in module.modules()]
        every = {id(t): t for _, was in self._held for t in was.values() if t is not None}
        self._tensors = [t for t in every.values() if t.layout is torch.strided]
        with torch.no_grad():
            self._values = [t.detach().clone() for t in self._tensors]
        self._streams = rng.save(generators(module))
        self._memory = Memory(module)

    def restore(self, *, values_only: bool = False) -> None:
        """Puts everything back, and clears gradients. ``values_only``: attributes, and tensors registered since, stay."""
        if not values_only:
            for own, was in self._held:
                if own.keys() != was.keys() or any(own[k] is not v for k, v in was.items()):
                    own.clear()
                    own.update(was)
            for module, plain in self._plain:
                vars(module).update(plain)
            self._memory.restore(tensors=False)
        with torch.no_grad():
            torch._foreach_copy_(self._tensors, self._values)
        for parameter in self._module.parameters():
            parameter.grad = None
        torch.clear_autocast_cache()
        rng.restore(self._streams)
        self._memory.restore_streams()


@dataclass(frozen=True)
class Left:
    """What one step left behind, copied. A missing gradient is None, which is no tensor of zeros. ``given``: shape and dtype of all
    that the network was called with."""

    loss: Bundle
    outputs: Bundle
    buffers: Bundle
    gradients: Bundle
    rng: Bundle
    given: tuple[dict[str, Any], ...] = ()

    def parts(self) -> Iterator[tuple[str, Bundle]]:
        for name in ("loss", "outputs", "buffers", "gradients", "rng"):
            yield name, getattr(self, name)

    def interned(self, known: Left) -> Left:
        """The same, parts with the bits of a known one replaced by it."""
        pairs = zip(self.parts(), known.parts(), strict=True)
        parts: dict[str, Any] = {name: theirs if mine.same(theirs) else mine for (name, mine), (_, theirs) in pairs}
        return replace(self, **parts)

    def unlike(self, other: Left) -> dict[str, list[Difference]]:
        """Part to differences; parts without any are left out."""
        found = {name: mine.unlike(getattr(other, name)) for name, mine in self.parts()}
        return {name: differences for name, differences in found.items() if differences}


class Forward:
    """Stands in for the network within one loss: calls it once, and may ``keep`` a copy of what it returned, and what it was given.
    ``seam``: where the loss' backward ends, if the network's is to run apart."""

    def __init__(self, bench: TrainBench, call: Callable[..., Any], twist: EagerTwist, keep: bool = True) -> None:
        self.bench, self.call, self.relaid, self.keep = bench, call, twist.incoming_layout, keep
        self.seam = Seam() if twist.backward_inside_autocast else None
        self.calls = 0
        self.seen: Bundle | None = None
        self.given: tuple[dict[str, Any], ...] = ()
        self.foreign: list[type] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        result = self.call(*args, **kwargs)
        self.foreign = tree.opaque(tree.flatten(result)[0])
        if self.keep:
            self.given = tuple(_described(x) for x in tree.flatten((args, kwargs))[0] if isinstance(x, Tensor))
            with self.bench.engine.quiet(), torch.no_grad():
                self.seen = bundle([(f"output {path}", leaf) for path, leaf in tree.paths(result)])
        result = as_static(result) if self.relaid else result
        return result if self.seam is None else self.seam.cut(result)


def _described(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def run_step(
    bench: TrainBench, subject: TrainSubject, call: Callable[..., Any], batch: tuple[Any, ...], *, cache: bool, twist: EagerTwist
) -> Left:
    """Forward, loss and backward, as a trainer has them: autocast around the loss, backward outside of it. ``call``: in place of the
    network. ``cache``: whether autocast keeps its casts of weights. Raises BrokenRow where the loss is none."""
    forward = Forward(bench, call, twist)
    loss = forward_and_backward(bench, subject, forward, batch, cache, lambda loss: loss * bench.scale)
    torch.cuda.synchronize()
    return left(bench, subject.module, loss, forward)


def forward_and_backward(
    bench: TrainBench,
    subject: TrainSubject,
    forward: Forward,
    batch: tuple[Any, ...],
    cache: bool,
    scaled: Callable[[Tensor], Tensor],
) -> Tensor:
    """The loss, detached, after the backward of what ``scaled`` makes of it. Raises BrokenRow where the loss is none."""
    with mixed(bench.dtype, cache):
        loss = subject.loss(forward, *batch)
        check_loss(loss, forward)
    scaled(loss).backward()
    if forward.seam is not None:
        with mixed(bench.dtype, cache):
            forward.seam.backward()
    return loss.detach()


def mixed(dtype: torch.dtype, cache: bool) -> contextlib.AbstractContextManager[Any]:
    """Autocast to ``dtype``. For float32 nothing at all: autocast around a network, even off, changes when its casts are forgotten."""
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast("cuda", dtype, cache_enabled=cache)


def unusable(loss: Any) -> str:
    """What is wrong of a loss, and the right form; empty where nothing is."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        what = f"a {loss.dtype} tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        return f"the loss is {what}, where a scalar is needed: reduce it, by mean() or sum()"
    return "" if loss.requires_grad else "the loss has no gradient: it is detached, or depends on no trainable parameter"


def check_loss(loss: Any, forward: Forward) -> None:
    """Raises BrokenRow with what is wrong of a step."""
    if problem := unusable(loss):
        raise BrokenRow(problem)
    if forward.calls != 1:
        raise BrokenRow(f"the loss called the network {forward.calls} times, where a step calls it once")
    if forward.foreign:
        raise BrokenRow(f"the network returns a {forward.foreign[0].__qualname__}, whose tensors cannot be seen: register it with "
                        "torch's pytree")  # fmt: skip


def left(bench: TrainBench, module: nn.Module, loss: Tensor, forward: Forward) -> Left:
    """Copies of what is there after a step, taken where no engine sees it."""
    assert forward.seen is not None
    with bench.engine.quiet(), torch.no_grad():
        return Left(
            bundle([("loss", loss)]),
            forward.seen,
            bundle([(f"buffer {name}", buffer) for name, buffer in module.named_buffers()]),
            bundle([(f"gradient {name}", p.grad) for name, p in module.named_parameters() if p.requires_grad]),
            bundle(streams(module)),
            forward.given,
        )


def streams(module: nn.Module) -> list[tuple[str, Any]]:
    """The state of every generator that a step may draw from; those of Python and NumPy as digests."""
    found: list[tuple[str, Any]] = [("generator", torch.cuda.get_rng_state()), ("host generator", torch.get_rng_state())]
    found += [(f"generator {i} of the module", g.get_state()) for i, g in enumerate(generators(module))]
    found.append(("Python's generator", _digest(random.getstate())))
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found.append(("NumPy's generator", _digest((kind, keys.tolist(), *rest))))
    return found


def _digest(state: Any) -> str:
    return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


def probes(accumulate: int) -> list[tuple[str, bool]]:
    """The steps of one run: (probe, whether gradients are cleared before it). Both probes at least."""
    names = itertools.cycle("AB")
    return [(next(names), i % accumulate == 0) for i in range(max(2, accumulate))]


def run_steps(bench: TrainBench, subject: TrainSubject, call: Callable[..., Any], *, cache: bool, twist: EagerTwist) -> list[Left]:
    """One run: a step per batch, weights held, gradients adding up over as many batches as the family declares. The state has to be
    the saved one."""
    found = []
    for probe, clear in probes(bench.family.accumulate):
        if clear:
            for parameter in subject.module.parameters():
                parameter.grad = None
        found.append(run_step(bench, subject, call, bench.args(probe), cache=cache, twist=twist))
    return found
