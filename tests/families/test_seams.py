"""LibreYOLO's seams on the emulated device: what is captured and what stays eager gives the bits of the uncut forward.

Those that build quickly; ``PARITY_TEST_EVERY_FAMILY=1`` adds Depth Anything 3.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from families.libreyolo import ZOO
from families.libreyolo.seams import PP_OCR, SENSENOVA, WHOLE, PackedTower, seam_of
from parity.judge.bits import same
from parity.rows import probes
from parity.rows.family import Family
from parity.rows.row import Settings
from parity.runtime import tree
from parity.runtime.emulated import device

FAMILIES = {f.key.partition("/")[2]: f for f in ZOO.families if isinstance(f, Family)}
CALLS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "fomo/point": lambda wrapper: wrapper._forward,
    "depth_anything3/depth": lambda wrapper: wrapper._forward,
    "birefnet/matte": lambda wrapper: wrapper._forward,
    "ppocr/ocr": lambda wrapper: wrapper.forward_det,
    "sam/segment": lambda wrapper: wrapper.forward_image_embeddings,
    "sensenova/vlm": lambda wrapper: wrapper.model.run_vit,
}
"""How the library itself runs the stage that is captured, and what it finishes eagerly."""
QUICK = [key for key in CALLS if key != "depth_anything3/depth" or os.environ.get("PARITY_TEST_EVERY_FAMILY")]

# what a zoo warns of while it is imported or run is not ours to fix
pytestmark = pytest.mark.filterwarnings("ignore")


def wrapper_of(key: str) -> Any:
    family = FAMILIES[key]
    torch.manual_seed(0)
    random.seed(0)
    subject = family.build(Settings(family.sizes[0], 1, family.dtype)).to(torch.device("cuda", 0))
    assert subject.native is not None
    return subject.native().wrapper  # type: ignore[attr-defined]


def arguments(key: str, probe: str, size: int = 0) -> tuple[Any, ...]:
    family = FAMILIES[key]
    made = probes.make(family.inputs(size or family.sizes[0], 1), probe, 0)[0]
    return tuple(x.to("cuda") if isinstance(x, torch.Tensor) else x for x in made)


def leaves(result: Any) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in tree.flatten(result)[0] if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("key", QUICK)
def test_within_a_scope_the_pieces_replay_and_the_whole_is_eagers(key: str, alone: Any) -> None:
    with device(), torch.no_grad():
        wrapper = wrapper_of(key)
        eager = {probe: leaves(CALLS[key](wrapper)(*arguments(key, probe))) for probe in "AB"}
        assert any(not same(a, b) for a, b in zip(eager["A"], eager["B"], strict=True))
        bound = seam_of(wrapper).bind(wrapper)
        with bound.scope():
            for probe in "AB":
                ours = leaves(CALLS[key](wrapper)(*arguments(key, probe)))
                assert all(same(a, b) for a, b in zip(ours, eager[probe], strict=True))
        (runner,) = bound.runners.values()
        assert (runner.info().captures, runner.info().replays, dict(runner.info().eager)) == (1, 2, {})

        ours = leaves(CALLS[key](wrapper)(*arguments(key, "B")))
        assert all(same(a, b) for a, b in zip(ours, eager["B"], strict=True))
        assert runner.info().replays == 2, "a graph was replayed though no scope is active"


def test_what_stays_eager_is_not_in_the_graph(alone: Any) -> None:
    with device(), torch.no_grad():
        wrapper = wrapper_of("birefnet/matte")
        (x,) = arguments("birefnet/matte", "A")
        with seam_of(wrapper).bind(wrapper).scope():
            whole = wrapper._forward(x)
            wrapper.model.forward_dec = lambda images, features: torch.zeros_like(images)
            assert not same(wrapper._forward(x), whole)


def test_ppocr_has_one_graph_per_shape_and_no_more_than_its_cap(alone: Any) -> None:
    with device(), torch.no_grad():
        wrapper = wrapper_of("ppocr/ocr")
        bound = dataclasses.replace(PP_OCR, max_graphs=2).bind(wrapper)
        with bound.scope():
            for size in (64, 96, 128, 64, 128):
                args = arguments("ppocr/ocr", "A", size)
                assert same(wrapper.forward_det(*args), wrapper.model.det.__class__.forward(wrapper.model.det, *args))
        info = bound.runners["model.det"].info()
        assert (info.captures, info.replays, sum(info.eager.values())) == (2, 3, 2)


def test_a_packing_of_sensenova_is_never_replayed_for_another_one(alone: Any) -> None:
    with device(), torch.no_grad():
        wrapper = wrapper_of("sensenova/vlm")
        tokens, positions, _, _ = arguments("sensenova/vlm", "A")
        count = len(tokens)

        def run(first: int) -> torch.Tensor:
            offsets = torch.tensor([0, first, count], dtype=torch.int32).to("cuda")
            result: torch.Tensor = wrapper.model.run_vit(tokens, positions, offsets, max(first, count - first))
            return result.clone()

        third = count // 3
        eager = run(third), run(count - third)
        assert not same(*eager), "two packings of the same shapes give the same: this test would see nothing"
        bound = seam_of(wrapper).bind(wrapper)
        with bound.scope():
            for _ in range(2):
                assert same(run(third), eager[0])
                assert same(run(count - third), eager[1])
        assert bound.runners[SENSENOVA.pieces[0]].info().captures == 2
        with dataclasses.replace(SENSENOVA, pieces=("model.vit_model",)).bind(wrapper).scope():
            run(third)
            assert not same(run(count - third), eager[1]), "the tower alone knows packings apart: PackedTower is not needed"
        assert isinstance(seam_of(wrapper) and wrapper.model.run_vit, PackedTower)


def test_every_wrapper_has_a_seam_whose_pieces_exist(alone: Any) -> None:
    with device():
        for key in ("nafnet/restore", "picosam3/segment", "edgetam/segment"):
            wrapper = wrapper_of(key)
            assert seam_of(wrapper).bind(wrapper).runners
        assert seam_of(wrapper_of("nafnet/restore")) is WHOLE
