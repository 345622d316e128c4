"""LibreYOLO's own capture path, unmodified, on the emulated device; and the fault of yolo9 that it cannot see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parity.runtime.emulated import device

pytest.importorskip("libreyolo")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def bits(value: Any) -> list[list[int]]:
    leaves = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist() for t in leaves]


def build(family: str, cls: str, size: str) -> Any:
    module = pytest.importorskip(f"libreyolo.models.{family}.model")
    torch.manual_seed(0)
    wrapper = getattr(module, cls)(model_path=None, size=size, device="cpu")
    wrapper.model.eval()
    return wrapper


def on_device(wrapper: Any) -> Any:
    wrapper.model.cuda()
    wrapper.device = torch.device("cuda", 0)
    return wrapper


def test_yolo9_replays_right_and_another_size_makes_it_stale() -> None:
    host = build("yolo9", "LibreYOLO9", "t")
    probes = torch.rand(1, 3, 64, 64), torch.randn(1, 3, 64, 64)
    plain = [bits(host._get_graph_runner().forward_fn(x)) for x in probes]
    with device():
        runner = on_device(build("yolo9", "LibreYOLO9", "t"))._get_graph_runner()
        a, b = (x.cuda() for x in probes)
        runner.forward_fn(a)
        eager = [bits(runner.forward_fn(x)) for x in (a, b)]
        assert eager == plain
        assert [bits(runner.run(x)) for x in (a, b, a)] == [eager[0], eager[1], eager[0]]
        info = runner.info()
        assert info["graph_count"] == 1
        assert info["captured"][0]["device"] == "cuda:0"
        assert info["captured"][0]["replays"] == 3
        assert info["fallback_reason"] is None
        graph = next(iter(runner._graphs.values())).graph
        assert graph.stale == []

        runner.forward_fn(torch.rand(1, 3, 128, 128).cuda())  # replaces the one entry of the anchor cache
        wrong = bits(runner.run(a))
        assert [str(s) for s in graph.stale] == ["float32[1, 2, 84]", "float32[1, 84]"]
        assert wrong[0] != eager[0][0]
        assert wrong[1:] == eager[0][1:]


def test_ppyoloe_is_refused_with_its_line() -> None:
    with device():
        runner = on_device(build("ppyoloe", "LibrePPYOLOE", "s"))._get_graph_runner()
        x = torch.rand(1, 3, 64, 64).cuda()
        runner.forward_fn(x)
        with pytest.raises(RuntimeError, match=r"h2d-copy at .*ppyoloe/nn\.py:\d+ torch\.cat\(anchors\)\.to\(device\)"):
            runner.capture(x)
        assert torch.cuda.current_stream() is torch.cuda.default_stream()
        assert not torch.cuda.is_current_stream_capturing()
