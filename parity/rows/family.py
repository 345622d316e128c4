"""What a zoo declares: families, their inputs, the verdicts it expects. Standard library only; torch is for the builders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from parity.rows.row import DEFAULT_ARMS, Row, Settings

if TYPE_CHECKING:
    import torch

    from parity.rows.training import Training


@dataclass(frozen=True)
class Input:
    """One input tensor, drawn anew for every probe: ``shape``, legal range ``low`` to ``high``, torch's name of the ``dtype``."""

    shape: tuple[int, ...]
    low: float = 0.0
    high: float = 1.0
    dtype: str = "float32"


@dataclass(frozen=True)
class Fixed:
    """An input tensor with the same ``values`` in every probe (positions, offsets): nested sequences, and a dtype."""

    values: Any
    dtype: str = "int64"


class Native(Protocol):
    """A zoo's own capture path, as its users call it."""

    def __call__(self, *args: Any) -> Any:
        """The forward through the zoo's own graphs, captured at first use of a shape; errors of the capture are raised."""

    def release(self) -> None:
        """Drops the graphs."""


@dataclass
class Subject:
    """A freshly built model, on the host. Lives in a child process only.

    ``module``: its parameters and buffers are the ones watched, scaled and put back. ``region``: what is captured.
    ``compose``: given a stand-in for the region, the whole forward; the identity unless the family is cut at a seam.
    ``place``: moves the model to a device (default: ``module.to``). ``native``: makes the zoo's own path, after ``place``.
    """

    module: torch.nn.Module
    region: Callable[..., Any]
    compose: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda region: region
    place: Callable[[torch.device], Any] | None = None
    native: Callable[[], Native] | None = None

    def to(self, device: torch.device) -> Subject:
        (self.place or self.module.to)(device)
        return self


@dataclass(frozen=True)
class Expect:
    """A verdict that a family declares for an arm, other than the safe one.

    ``reason`` is for people and may not be empty. ``cause``: slug of DESIGN section 6. ``version``: prefix of the zoo's version it
    holds for, empty for all. ``engines``: where it can be seen. ``boundary``: the settings' boundary it is about. ``check``: the
    one that must be the first to fail, for controls. ``dtypes``: the settings' dtypes it is about, empty for all.
    """

    verdict: str
    reason: str
    cause: str = ""
    version: str = ""
    engines: tuple[str, ...] = ("cuda", "emulated")
    boundary: str = ""
    check: str = ""
    dtypes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.reason.split()) < 3:
            raise ValueError(f"an expected {self.verdict!r} needs a reason that a stranger understands, not {self.reason!r}")


@dataclass(frozen=True)
class Family:
    """One architecture of a zoo at one task.

    ``build(settings)`` returns a Subject on the host with random weights: the default generators are seeded before the call, and it
    may neither reach the network nor write files. ``inputs(size, batch)`` returns the positional arguments of a forward as a tuple of
    any nesting whose leaves are Input, Fixed, or plain Python values. ``sizes``: the recommended one (small, for certification), then
    the native one. ``other_size``, ``other_batch``: a second legal size and batch for the check ``interleave`` (None: there is none).
    ``expected``: arm to Expect, where the verdict is not the safe one. ``unavailable``: why no row of it can be judged here.
    ``builds_on_device``: ``build`` may also run with the device as torch's default one, which draws weights faster.
    For case files: ``probes(device)`` draws both argument tuples itself, ``between(module)`` is called between probes in every arm,
    ``context(device)`` is a context manager around a whole arm.
    """

    zoo: str
    name: str
    task: str
    build: Callable[[Settings], Subject]
    inputs: Callable[[int, int], tuple[Any, ...]]
    sizes: tuple[int, ...] = (0,)
    other_size: int | None = None
    other_batch: int | None = 2
    dtype: str = "float32"
    arms: tuple[str, ...] = DEFAULT_ARMS
    boundaries: tuple[str, ...] = ("",)
    expected: Mapping[str, tuple[Expect, ...]] = field(default_factory=dict)
    unavailable: str = ""
    builds_on_device: bool = False
    probes: Callable[[Any], tuple[tuple[Any, ...], tuple[Any, ...]]] | None = None
    between: Callable[[Any], None] | None = None
    context: Callable[[Any], Any] | None = None

    mode = "inference"

    def __post_init__(self) -> None:
        if not self.sizes or len(set(self.sizes)) != len(self.sizes):
            raise ValueError(f"{self.key}: sizes={self.sizes} must name each size once")
        for row in self.rows():
            row.id  # noqa: B018  (raises where a part cannot stand in an id)

    @property
    def key(self) -> str:
        return f"{self.zoo}/{self.name}/{self.task}"

    def rows(self) -> list[Row]:
        """Every row this family declares, arm by arm, recommended size first; a zoo's own path knows its own boundary only."""
        return [
            Row(self.zoo, self.name, self.task, "inference", Settings(size, 1, self.dtype, boundary), arm)
            for size in self.sizes
            for boundary in self.boundaries
            for arm in self.arms
            if arm != "native" or not boundary
        ]

    def expectation(self, row: Row, engine: str, version: str) -> Expect | None:
        """What is declared for a row on an engine ('cuda' or 'emulated') and a zoo version; None: the safe verdict."""
        return expectation(self.expected, row, engine, version)


def expectation(expected: Mapping[str, tuple[Expect, ...]], row: Row, engine: str, version: str) -> Expect | None:
    """The first declaration, of those for the row's arm, that is about this row, engine and zoo version."""
    for expect in expected.get(row.arm, ()):
        fits = expect.boundary == row.settings.boundary and (not expect.dtypes or row.settings.dtype in expect.dtypes)
        if fits and engine in expect.engines and version.startswith(expect.version):
            return expect
    return None


@dataclass(frozen=True)
class Zoo:
    """A package of models. ``module``: what must be importable. ``install``: the pip command that brings it, shown when it is not.

    ``warm()`` imports everything a child will need, in the process that children are forked from: no CPU op, no CUDA, no network.
    ``version()``: the installed version. ``environment()``: facts about the zoo that a certificate does not cover otherwise.
    """

    name: str
    module: str
    install: str
    families: tuple[Family | Training, ...]
    warm: Callable[[], None]
    version: Callable[[], str]
    environment: Callable[[], Mapping[str, str]] = dict
