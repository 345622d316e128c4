"""What a zoo declares of its training: a network inside a step, its batches, the verdicts it expects. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from parity.rows.family import Expect, expectation
from parity.rows.row import Row, Settings

if TYPE_CHECKING:
    import torch

DTYPES = ("float16", "bfloat16", "float32")
"""The settings of a training row: the dtype that autocast casts to; float32 stands for no autocast. Weights are float32 in all."""


class NativeTraining(Protocol):
    """A zoo's own manager of training graphs, as its trainer uses it: stands in for the network."""

    autocast_cache: bool
    """Whether the zoo's trainer leaves the autocast weight cache on while its graphs are in use."""

    def __call__(self, *args: Any) -> Any:
        """The network's outputs, through the manager's graph once there is one."""

    def ready(self) -> bool:
        """Whether the next call replays."""

    def reason(self) -> str:
        """Why it gave up, or empty."""


@dataclass
class TrainSubject:
    """A freshly built model in training mode, on the host. Lives in a child process only.

    ``module``: its parameters and buffers are the ones watched, updated and put back. ``network``: what is captured.
    ``loss(forward, *batch)``: one forward pass and the loss, a scalar with a gradient; ``forward`` stands in for ``network`` and is
    called once. The caller provides autocast, backward and optimizer. ``place``: moves everything to a device (default:
    ``module.to``). ``native``: makes the zoo's own manager, after ``place``. ``switch``: a change of what the network computes that
    happens in the middle of a run (yolox adds a branch); None where there is none.
    """

    module: torch.nn.Module
    network: torch.nn.Module
    loss: Callable[..., torch.Tensor]
    place: Callable[[torch.device], Any] | None = None
    native: Callable[[], NativeTraining] | None = None
    switch: Callable[[], None] | None = None

    def to(self, device: torch.device) -> TrainSubject:
        (self.place or self.module.to)(device)
        return self


@dataclass(frozen=True)
class Training:
    """One architecture of a zoo, trained at one task.

    ``build(settings)`` returns a TrainSubject on the host with random weights: the default generators are seeded before the call, and
    it may neither reach the network nor write files. ``draw(settings, probe, seed)`` returns one batch as a tuple of host tensors and
    plain values, alike for the same arguments; ``probe`` is 'A' or 'B', whose images and targets differ. ``size``, ``batch``: of the
    row; ``other_size``: a second legal size for the changed shape of the trajectory (None: the batch changes instead).
    ``seam``: what is captured, for people. ``mechanism``: the kind of seam, which the trajectory picks its families by.
    ``expected``: arm to Expect, where the verdict is not the safe one; ``Expect.dtypes`` narrows it.
    ``classes``: arm to (class, cause) of a safe row that has to be of exactly this class, for controls; other rows may have any that is
    proved. For case files: ``probes(device)`` draws both batches itself, ``context(device)`` is a context manager around a whole arm,
    ``accumulate``: how many batches' gradients add up before they are compared.
    """

    zoo: str
    name: str
    task: str
    build: Callable[[Settings], TrainSubject]
    draw: Callable[[Settings, str, int], tuple[Any, ...]]
    size: int = 0
    batch: int = 2
    other_size: int | None = None
    dtypes: tuple[str, ...] = DTYPES
    arms: tuple[str, ...] = ("graphed", "native")
    seam: str = "the whole network"
    mechanism: str = "network"
    accumulate: int = 2
    expected: Mapping[str, tuple[Expect, ...]] = field(default_factory=dict)
    classes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    unavailable: str = ""
    probes: Callable[[Any], tuple[tuple[Any, ...], tuple[Any, ...]]] | None = None
    context: Callable[[Any], Any] | None = None

    mode = "training"

    def __post_init__(self) -> None:
        for row in self.rows():
            row.id  # noqa: B018  (raises where a part cannot stand in an id)

    @property
    def key(self) -> str:
        return f"{self.zoo}/{self.name}/{self.task}"

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.size,)

    def rows(self) -> list[Row]:
        """Every row, arm by arm, in the order of ``dtypes``."""
        return [
            Row(self.zoo, self.name, self.task, "training", Settings(self.size, self.batch, dtype), arm)
            for dtype in self.dtypes
            for arm in self.arms
        ]

    def expectation(self, row: Row, engine: str, version: str) -> Expect | None:
        """What is declared for a row on an engine ('cuda' or 'emulated') and a zoo version; None: the safe verdict."""
        return expectation(self.expected, row, engine, version)
