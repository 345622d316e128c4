"""A short fine-tune through LibreYOLO's own ``train()`` on generated images: eagerly, with the library's graphs, or with ours.

Everything it writes lies in a temporary folder that is gone afterwards. Two runs with equal arguments start from equal weights and see
equal batches.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from .adapter import Manager, parity_graphs
from .training import RECIPES, Recipe
from .wrapper import offline

GRAPHS = ("off", "parity", "upstream")


@dataclass(frozen=True)
class Finetuned:
    """``steps``, ``epochs``: losses, per step and averaged per epoch. ``metrics``: of validation, per epoch that had one, timings left
    out. ``weights``: sha256 over the trained parameters and buffers and those of the moving average, in order of their names.
    ``seconds``: wall clock of ``train()``, of which ``epoch_seconds`` the epochs. ``replays``: None where the library does not count
    them. ``reason``: why it trained eagerly in spite of ``graphs``."""

    family: str
    graphs: str
    steps: tuple[float, ...]
    epochs: tuple[float, ...]
    metrics: tuple[dict[str, float], ...]
    weights: str
    seconds: float
    epoch_seconds: tuple[float, ...]
    captured: bool
    replays: int | None
    reason: str

    def differs(self, other: Finetuned) -> list[str]:
        """Which of the results of two runs are not the same bits (any NaN is like any other)."""
        return [name for name in ("steps", "epochs", "metrics", "weights") if repr(getattr(self, name)) != repr(getattr(other, name))]


@dataclass
class _Seen:
    trainers: list[Any] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)


@contextlib.contextmanager
def _observed() -> Iterator[_Seen]:
    """Every trainer that is set up, and the loss of every step, as a tensor."""
    from libreyolo.training.trainer import BaseTrainer

    seen = _Seen()
    start, forward = BaseTrainer._start_cuda_graph_manager, BaseTrainer._forward_train

    def started(trainer: Any) -> None:
        seen.trainers.append(trainer)
        start(trainer)

    def forwarded(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = forward(trainer, *args, **kwargs)
        seen.losses.append(outputs["total_loss"].detach())
        return outputs

    with (
        mock.patch.object(BaseTrainer, "_start_cuda_graph_manager", started),
        mock.patch.object(BaseTrainer, "_forward_train", forwarded),
    ):
        yield seen


def _why(manager: Any) -> tuple[bool, int | None, str]:
    if manager is None:
        return False, None, "the trainer made no manager"
    if isinstance(manager, Manager):
        graphs = manager.graphs
        if graphs is None:
            return False, 0, "no step was taken"
        return manager.captured, graphs.replays, graphs.reason or ("its network hands out nothing to train" if manager.disabled else "")
    return manager.captured, None, "the library's manager gave up" if manager.disabled else ""


def _untimed(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("speed/")}


def _weights(trainer: Any) -> str:
    digest = hashlib.sha256()
    average = trainer.ema_model.ema if trainer.ema_model is not None else None
    for module in (trainer.model, average):
        for name, tensor in sorted(module.state_dict().items()) if module is not None else ():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().numpy().tobytes())
    return digest.hexdigest()


def _seeded(seed: int) -> None:
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def train_once(
    family: str,
    graphs: str = "off",
    *,
    epochs: int = 3,
    batch: int = 4,
    size: int | None = None,
    images: int = 24,
    device: str = "cuda",
    seed: int = 0,
    **arguments: Any,
) -> Finetuned:
    """``graphs``: 'off', 'parity' or 'upstream'. ``images``: of the training split; a quarter as many validate. ``size``: edge in
    pixels, by default the small one that the family is certified at. ``arguments``: more of ``train()``, such as ``amp_dtype``.

    Raises ValueError for a family or ``graphs`` that is unknown, and whatever ``train()`` raises."""
    if graphs not in GRAPHS:
        raise ValueError(f"graphs={graphs!r}: one of {', '.join(GRAPHS)}")
    recipe = next((r for r in RECIPES if r.module == family), None)
    if recipe is None:
        raise ValueError(f"no family whose training is captured is called {family!r}: {', '.join(r.module for r in RECIPES)}")
    from .dataset import dataset

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parity-finetune-")))
        data = dataset(folder / "data", recipe.task, images, max(2, images // 4), seed)
        stack.enter_context(offline())
        _seeded(seed)
        wrapper = _wrapper(recipe, device)
        runs = stack.enter_context(parity_graphs()) if graphs == "parity" else None
        seen = stack.enter_context(_observed())
        options = {
            "epochs": epochs,
            "batch": batch,
            "imgsz": size or recipe.size,
            "device": device,
            "workers": 0,
            "seed": seed,
            "cuda_graph": graphs != "off",
            "project": str(folder / "runs"),
            "name": family,
            "exist_ok": True,
            **arguments,
        }
        started = time.perf_counter()
        wrapper.train(data=str(data), **options)
        seconds = time.perf_counter() - started
        (trainer,) = seen.trainers
        captured, replays, reason = _why(trainer._cuda_graph_manager) if graphs != "off" else (False, None, "")
        assert runs is None or runs.managers in ([], [trainer._cuda_graph_manager])
        return Finetuned(
            family,
            graphs,
            tuple(float(loss) for loss in seen.losses),
            tuple(trainer.epoch_losses),
            tuple(_untimed(event.val_metrics) for event in trainer.epoch_events if event.validated),
            _weights(trainer),
            seconds,
            tuple(event.epoch_seconds for event in trainer.epoch_events),
            captured,
            replays,
            reason,
        )


def _wrapper(recipe: Recipe, device: str) -> Any:
    cls = getattr(importlib.import_module(f"libreyolo.models.{recipe.module}.model"), recipe.cls)
    return cls(size=recipe.variant, device=device, task=recipe.task, **{"model_path": None, **recipe.arguments})
