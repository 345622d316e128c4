"""LibreYOLO's own training graphs, as its trainer uses them, except that a fallback can be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def manager_of() -> Any:
    """A TrainGraphManager of the library that remembers in ``why`` the reason it gave up for."""
    from libreyolo.training.cuda_graph import TrainGraphManager

    class Manager(TrainGraphManager):  # type: ignore[misc,unused-ignore]  # untyped where it is installed, absent elsewhere
        why = ""

        def _disable(self, reason: str) -> None:
            self.why = reason
            super()._disable(reason)

    # kept gradients are what a trainer that accumulates asks for; without any, nothing is copied
    return Manager(preserve_accumulated_grads=True)


class NativeTraining:
    """In the place of ``network``, for batches of images alone.

    The library's capture rebinds the ``forward`` of the network that it is given. So it gets a specification of its own, and
    ``network``, which runs the eager steps, stays what it was.
    """

    autocast_cache = False
    """``BaseTrainer._autocast_context``: off as soon as there is a manager, in eager steps too."""

    def __init__(self, trainer: Any, network: nn.Module) -> None:
        self.trainer, self.network = trainer, network
        self.manager = manager_of()
        self.spec = trainer.cuda_graph_train_spec()
        trainer._cuda_graph_manager = self.manager  # where invalidate_cuda_graph looks for it

    def __call__(self, images: Any) -> Any:
        flat = self.manager.run(self.spec, images)
        return self.network(images) if flat is None else flat

    def ready(self) -> bool:
        return bool(self.manager.captured)

    def reason(self) -> str:
        return str(self.manager.why)
