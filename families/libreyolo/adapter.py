"""LibreYOLO's trainers with TrainGraphs in the place of their manager, the package unchanged.

    with parity_graphs():
        model.train(data=..., cuda_graph=True)

Where the library decides, it goes on deciding: a run on another device, a distributed one, one that distils or compiles gets no manager
(``BaseTrainer._start_cuda_graph_manager``), so nothing of ours either. What differs from its manager:

- The weight cache of autocast stays on, as an eager run has it (``BaseTrainer._autocast_context`` turns it off beside a manager).
- An eager step is listened to, so it runs the specification's network and its eager rest, which give the bits of ``on_forward``.
- A specification whose network hands out nothing to train (Dome-DETR's) is set aside after the first batch, which is done again.
- Validation runs eagerly: the library would capture it too, and replay yolo9's with dead anchors.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("parity.runtime")


@dataclass
class Runs:
    """The managers that were made within one ``parity_graphs``, one for each training run that got any."""

    managers: list[Manager] = field(default_factory=list)


class Manager:
    """What ``BaseTrainer`` asks of its manager, answered by TrainGraphs. ``options``: of TrainGraphs."""

    def __init__(self, name: str, log: Callable[[str], None], options: dict[str, Any]) -> None:
        self.name, self.log, self.options = name, log, options
        self.disabled = False
        """Once True the trainer asks no more and calls ``on_forward``."""
        self.graphs: Any = None

    @property
    def captured(self) -> bool:
        return self.graphs is not None and self.graphs.captures > 0

    def run(self, spec: Any, images: torch.Tensor) -> Any:
        """The network's outputs, or None where the trainer is to call ``on_forward`` on this batch."""
        if self.disabled:
            return None
        first = self.graphs is None
        if first:
            from parity.runtime import TrainGraphs

            self.graphs = TrainGraphs(spec.network, log=self.log, **self.options)
            self.graphs.name = self.name
        flat = self._first(spec, images) if first else self.graphs(images)
        if flat is None or self.graphs.reason:
            self.disabled = True
        return flat

    def _first(self, spec: Any, images: torch.Tensor) -> Any:
        """None, and everything as before, where no gradient could reach the network."""
        import torch

        from parity.runtime import rng
        from parity.runtime.invalidation import generators

        buffers = [(buffer, buffer.detach().clone()) for buffer in spec.network.buffers()]
        streams = rng.save(generators(spec.network)) if images.is_cuda else None
        flat = self.graphs(images)
        if any(tensor.requires_grad for tensor in flat):
            return flat
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        if streams is not None:
            rng.restore(streams)
        self.log(f"cuda_graph: {self.name} trains eagerly: its specification's network hands out nothing that a loss could train")
        return None

    def invalidate(self, reason: str) -> None:
        if self.graphs is not None:
            self.graphs.invalidate(reason)


@contextlib.contextmanager
def parity_graphs(log: Callable[[str], None] | None = None, certified: bool = False, **options: Any) -> Iterator[Runs]:
    """Within it ``train(cuda_graph=True)`` of LibreYOLO uses TrainGraphs.

    ``log`` receives the line that says why a run is eager (default: a warning of the logger ``parity.runtime``). ``certified``: only
    what the allowlist holds is captured. ``options``: of TrainGraphs. Patches the package's base classes for the whole process.
    """
    from libreyolo.training.trainer import BaseTrainer
    from libreyolo.validation.base import BaseValidator

    runs = Runs()
    start, autocast = BaseTrainer._start_cuda_graph_manager, BaseTrainer._autocast_context

    def start_ours(trainer: Any) -> None:
        start(trainer)
        if trainer._cuda_graph_manager is not None:
            chosen = {"identity": _identity(trainer), **options} if certified else options
            trainer._cuda_graph_manager = Manager(trainer.get_model_tag(), log or _LOG.warning, chosen)
            runs.managers.append(trainer._cuda_graph_manager)

    def autocast_as_eager(trainer: Any) -> Any:
        with mock.patch.object(trainer, "_cuda_graph_manager", None):
            return autocast(trainer)

    with (
        mock.patch.object(BaseTrainer, "_start_cuda_graph_manager", start_ours),
        mock.patch.object(BaseTrainer, "_autocast_context", autocast_as_eager),
        mock.patch.object(BaseValidator, "_capture_val_graph", return_value=False),
    ):
        yield runs


def _identity(trainer: Any) -> Any:
    from parity.runtime.identity import Identity

    from .installed import version

    return Identity("libreyolo", trainer.get_model_family(), trainer.wrapper_model.task, "training", version())
