"""From a declaration to something that runs: seeded builds, arguments on the device, and weights that let an output move."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from parity.judge.bits import same
from parity.judge.outcome import NETWORK_ERRORS
from parity.rows import probes
from parity.rows.family import Family, Subject
from parity.rows.row import Row
from parity.rows.training import TrainSubject
from parity.runtime import rng, tree
from parity.runtime.engine import DEVICE, Engine
from parity.runtime.errors import ParityError
from parity.runtime.refusal import chain
from parity.runtime.state import unlike

S = TypeVar("S", Subject, TrainSubject)


class BrokenRow(Exception):
    """The row itself is at fault: its builder, its probes or its module. The message says what, and what the right form is."""


@contextlib.contextmanager
def blamed(told: Callable[[], str]) -> Iterator[None]:
    """What is raised within is the row's fault, ``told`` naming the place; short memory, an absent network and what this package
    raises on purpose are not."""
    try:
        yield
    except (ParityError, BrokenRow, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if any(type(link).__name__ in NETWORK_ERRORS for link in chain(error)):
            raise
        raise BrokenRow(f"{told()} raised {type(error).__name__}: {error}") from error


def seed_everything(seed: int) -> None:
    """All default generators: host, device, Python's and NumPy's."""
    torch.manual_seed(seed)
    torch.cuda.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@dataclass
class AnyBench(Generic[S]):
    """Builds the subject of a row again and again, always alike, and draws its arguments: what both modes have in common.

    A mode says what its subject is (``kind``), what it ``checked`` of a build before that goes to the device, and how its arguments are
    ``_made`` where no case file draws them by hand.
    """

    row: Row
    family: Any
    engine: Engine
    seed: int
    kind: ClassVar[Any]
    _drawn: dict[tuple[str, str], tuple[Any, ...]] = field(default_factory=dict, init=False)

    def build(self) -> S:
        """A fresh subject on the device, generators seeded. Raises BrokenRow."""
        with self.engine.quiet():
            seed_everything(self.seed)
            with blamed(lambda: "build()"), self.place():
                subject: Any = self.family.build(self.row.settings)
            if not isinstance(subject, self.kind) or not isinstance(subject.module, nn.Module):
                found = type(getattr(subject, "module", subject)).__name__
                raise BrokenRow(f"build() returned a {found}, not a {self.kind.__name__} around a torch.nn.Module")
            self.checked(subject.module)
        made: S = subject.to(DEVICE)
        self.settle(made)
        seed_everything(self.seed)
        return made

    def settle(self, subject: S) -> None:
        """What a build still lacks once it is on the device."""

    def place(self) -> contextlib.AbstractContextManager[Any]:
        """Where builders put what they make."""
        return contextlib.nullcontext()

    def checked(self, module: nn.Module) -> None:
        """Looks at a build on the host. Raises BrokenRow."""

    def args(self, probe: str, variant: str = "") -> tuple[Any, ...]:
        """Fresh copies of a probe's arguments on the device. Raises BrokenRow where they cannot be drawn."""
        if (probe, variant) not in self._drawn:
            before = rng.save()
            self._drawn[probe, variant] = self._draw(probe, variant)
            rng.restore(before)  # what is drawn late must not be seen in what runs
        leaves, spec = tree.flatten(self._drawn[probe, variant])
        moved = self.family.probes is None
        copied: tuple[Any, ...] = tree.unflatten(
            [(x.to(DEVICE) if moved else x.clone()) if isinstance(x, Tensor) else x for x in leaves], spec
        )
        return copied

    def _draw(self, probe: str, variant: str) -> tuple[Any, ...]:
        if self.family.probes is None:
            return self._made(probe, variant)
        with blamed(lambda: "probes(device)"):
            drawn = self.family.probes(DEVICE)
        if not (isinstance(drawn, tuple) and len(drawn) == 2 and all(isinstance(x, tuple) for x in drawn)):
            raise BrokenRow("probes(device) must return two tuples of arguments: ((x,), (y,))")
        found: tuple[Any, ...] = drawn[probes.PROBES.index(probe)]
        return found

    def _made(self, probe: str, variant: str) -> tuple[Any, ...]:
        raise NotImplementedError


@dataclass
class Bench(AnyBench[Subject]):
    """Of an inference row. ``patch``: weights found by ``sensitize``, laid over every build."""

    family: Family
    patch: dict[str, Tensor] = field(default_factory=dict)
    probes: list[dict[str, Any]] = field(default_factory=list)
    kind = Subject

    def place(self) -> contextlib.AbstractContextManager[Any]:
        """Large models draw their weights on the device where their builder says that it may run there."""
        return torch.device(DEVICE) if self.family.builds_on_device and self.engine.certifies else contextlib.nullcontext()

    def checked(self, module: nn.Module) -> None:
        if self.patch:
            _lay_over(module, self.patch)

    def settle(self, subject: Subject) -> None:
        """Parameters that take their shape from the first call have it before anything is compared."""
        if any(map(is_lazy, itertools.chain(subject.module.parameters(), subject.module.buffers()))):
            seed_everything(self.seed)
            with blamed(lambda: "the forward that gives parameters their shape"), torch.no_grad():
                subject.compose(subject.region)(*self.args("A"))

    def variant(self, name: str) -> tuple[int, int] | None:
        """(size, batch) of '' (the row's own), 'size' or 'batch' (the check ``interleave``); None where there is no such one."""
        own = self.row.settings
        if name == "size":
            return None if self.family.other_size is None else (self.family.other_size, own.batch)
        if name == "batch":
            return None if self.family.other_batch is None else (own.size, self.family.other_batch)
        return own.size, own.batch

    def _made(self, probe: str, variant: str) -> tuple[Any, ...]:
        shape = self.variant(variant)
        assert shape is not None
        with self.engine.quiet(), blamed(lambda: "inputs(size, batch)"):
            specs = self.family.inputs(*shape)
            if not isinstance(specs, tuple):
                raise BrokenRow(f"inputs(size, batch) must return a tuple of arguments, not a {type(specs).__name__}: (Input(...),)")
            value, described = probes.make(specs, probe, self.seed)
        if variant == "":
            self.probes += described
        made: tuple[Any, ...] = value
        return made


def _lay_over(module: nn.Module, patch: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in state(module).items():
            if name in patch:
                tensor.copy_(patch[name])


def state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, non-persistent buffers included."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def apart(first: dict[str, Tensor], second: dict[str, Tensor]) -> str | None:
    """What tells two builds apart, or None."""
    if first.keys() != second.keys():
        return f"the names of parameters and buffers: {sorted(first.keys() ^ second.keys())[:3]}"
    for name in first:
        if first[name].shape != second[name].shape or first[name].dtype != second[name].dtype:
            return name
    differ = unlike(list(first.values()), list(second.values()))
    return next((name for name, flag in zip(first, differ, strict=True) if flag), None)


def sensitize(module: nn.Module, forward: Any, batches: list[tuple[Any, ...]], seed: int) -> dict[str, Tensor]:
    """Weights under which an output can depend on the input: constant weight matrices (zero-initialised heads) are drawn anew,
    BatchNorm statistics are calibrated on ``batches``. Changes ``module`` and returns the changed tensors, on the host."""
    before = {name: tensor.clone() for name, tensor in state(module).items()}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1 and parameter.numel() > 1 and bool((parameter == parameter.reshape(-1)[0]).all()):
                drawn = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.copy_(drawn.to(parameter.device, parameter.dtype))
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None]
    momenta = [m.momentum for m in norms]
    flags = [(m, m.training) for m in module.modules()]
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a cumulative average: both batches count alike
            norm.training = True
        if norms:
            for args in batches:
                forward(*args)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for child, training in flags:
            child.training = training
    return {name: tensor.detach().cpu().clone() for name, tensor in state(module).items() if not same(tensor, before[name])}
