"""From a LibreYOLO wrapper to a Subject: what is captured, how it moves, the library's own graphs. Knows no family."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from parity.rows.family import Subject

if TYPE_CHECKING:
    import torch

WHOLE = "whole"  # the boundary that ignores the library's seam


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Within it the Hugging Face client keeps off the network, and what constructors print goes to stderr."""
    from huggingface_hub import constants

    variable, constant = os.environ.get("HF_HUB_OFFLINE"), constants.HF_HUB_OFFLINE
    os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE = "1", True
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        constants.HF_HUB_OFFLINE = constant
        if variable is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = variable


class _StandIn:
    """In the place of the library's GraphRunner: its own ``_forward`` finishes what a stand-in for the region began."""

    def __init__(self, region: Callable[..., Any]) -> None:
        self.region = region

    def run(self, tensor: torch.Tensor, auto: bool = False) -> Any:
        return self.region(tensor)


class Native:
    """The library's graphs as ``predict(..., cuda_graph=True)`` uses them, except that a failed capture raises.

    ``dispatch(*args)`` is the call that replays within a graph scope; ``prepare(*args)`` what it does before a capture.
    """

    def __init__(self, wrapper: Any, dispatch: Callable[..., Any], prepare: Callable[..., None] = lambda *args: None) -> None:
        self.wrapper, self.dispatch, self.prepare = wrapper, dispatch, prepare

    def __call__(self, *args: Any) -> Any:
        import torch

        with torch.no_grad(), self.wrapper.cuda_graph_scope(True):
            runner = self.wrapper._get_graph_runner()
            self.prepare(*args)
            # run() would warn and go on eagerly; capture() raises, and does nothing where this shape has its graph
            runner.capture(args[0])
            before = _replays(runner)
            result = self.dispatch(*args)
            if _replays(runner) != before + 1:
                reason = runner.info()["fallback_reason"] or "it gave no reason"
                raise RuntimeError(f"{self.wrapper.family}: the library went on eagerly instead of replaying: {reason}")
            return result

    def release(self) -> None:
        self.wrapper.release_graphs()


def _replays(runner: Any) -> int:
    return sum(graph["replays"] for graph in runner.info()["captured"])


def place(wrapper: Any, device: torch.device) -> None:
    """What ``predict(device=...)`` moves, and the tensors that the wrapper itself holds (CLIP's text embeddings)."""
    import torch

    wrapper._invalidate_cuda_graphs("device change")
    wrapper.device = device
    wrapper.model.to(device)
    for name, value in vars(wrapper).items():
        if isinstance(value, torch.Tensor):
            setattr(wrapper, name, value.to(device))


def _composed(wrapper: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def compose(region: Callable[..., Any]) -> Callable[..., Any]:
        def forward(tensor: torch.Tensor) -> Any:
            before = wrapper._graph_runner, wrapper._cuda_graph_mode
            wrapper._graph_runner, wrapper._cuda_graph_mode = _StandIn(region), "on"
            try:
                return wrapper._forward(tensor)
            finally:
                wrapper._graph_runner, wrapper._cuda_graph_mode = before

        return forward

    return compose


def subject_of(
    wrapper: Any,
    boundary: str = "",
    *,
    region: Callable[..., Any] | None = None,
    dispatch: Callable[..., Any] | None = None,
    prepare: Callable[..., None] = lambda *args: None,
) -> Subject:
    """The Subject of a wrapper in eval mode.

    ``region``: default what the library's runner captures, or with ``boundary`` 'whole' the forward uncut. ``dispatch``
    and ``prepare``: see Native.
    """
    from libreyolo.models.base.cuda_graph import forward_maybe_graphed

    wrapper.model.eval()
    seam = wrapper.GRAPH_DISPATCH_IN_FORWARD if hasattr(wrapper, "GRAPH_DISPATCH_IN_FORWARD") else False
    if region is None:
        region = wrapper._forward if boundary == WHOLE else wrapper._get_graph_runner().forward_fn
    return Subject(
        wrapper.model,
        region,
        compose=_composed(wrapper) if seam and boundary != WHOLE else lambda stand_in: stand_in,
        place=lambda device: place(wrapper, device),
        native=lambda: Native(wrapper, dispatch or (lambda tensor: forward_maybe_graphed(wrapper, tensor)), prepare),
    )
