"""What the zoos declare of their training: it builds offline and alike, its step is finite, its batches are alike for equal arguments.

A sample runs by default; ``PARITY_TEST_EVERY_FAMILY=1`` runs every declaration (minutes).
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from families.libreyolo import ZOO as LIBREYOLO
from families.libreyolo import domedetr, manager
from families.libreyolo.training import RECIPES, trainer_of
from families.torchvision import CONVOLUTIONAL, FIXED, INCEPTION, TRAINED, WINDOWED
from families.torchvision import ZOO as TORCHVISION
from parity.judge.bits import same
from parity.judge.outcome import CAUSES
from parity.judge.verdict import VERDICTS
from parity.rows.row import Settings
from parity.rows.training import Training, TrainSubject
from parity.runtime import tree
from parity.runtime.emulated import device

FAMILIES = {f.key: f for zoo in (LIBREYOLO, TORCHVISION) for f in zoo.families if isinstance(f, Training)}
RECIPE = {recipe.module: recipe for recipe in RECIPES}
UPSTREAM = {
    "detect": "yolo9 yolo9_p2 yolo9_e2e yolox yolo7 yolonas picodet rtmdet rfdetr dfine deim deimv2 rtdetr rtdetrv2 rtdetrv4 ec",
    "classify": "resnet convnext mobilenetv4 efficientnetv2",
    "semantic": "segformer lingbotvision",
    "point": "fomo",
    "restore": "nafnet",
}
"""The 24 families whose training LibreYOLO documents as captured (docs/training_cuda_graphs.md)."""
MORE = {"convnextv2/classify", "domedetr/detect", "gtr/detect", "tinyformer/detect"}
QUICK = [
    "libreyolo/yolox/detect", "libreyolo/picodet/detect", "libreyolo/deimv2/detect", "libreyolo/mobilenetv4/classify",
    "libreyolo/segformer/semantic", "libreyolo/fomo/point", "torchvision/googlenet/classify", "torchvision/shufflenet_v2_x0_5/classify",
]  # fmt: skip
EVERY = bool(os.environ.get("PARITY_TEST_EVERY_FAMILY"))
CHOSEN = list(FAMILIES) if EVERY else QUICK
CUDA = torch.device("cuda", 0)

# what a zoo warns of while it is imported or run is not ours to fix
pytestmark = pytest.mark.filterwarnings("ignore")


def settings(family: Training, size: int = 0, batch: int = 0) -> Settings:
    return Settings(size or family.size, batch or family.batch, "float32")


def built(family: Training, size: int = 0) -> TrainSubject:
    torch.manual_seed(0)
    random.seed(0)
    return family.build(settings(family, size))


def step(subject: TrainSubject, batch: tuple[Any, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    subject.module.zero_grad()
    loss = subject.loss(subject.network, *batch)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in subject.module.named_parameters() if p.grad is not None}


def test_every_family_that_upstream_captures_is_declared() -> None:
    upstream = {f"{name}/{task}" for task, names in UPSTREAM.items() for name in names.split()}
    assert len(upstream) == 24
    assert {f.key.partition("/")[2] for f in FAMILIES.values() if f.zoo == "libreyolo"} == upstream | MORE


def test_every_other_trainer_of_the_library_hands_out_no_specification(warmed: None) -> None:
    """A family that the library begins to capture would be missing from the declarations."""
    import importlib
    import pkgutil

    import libreyolo.models
    from libreyolo.training.trainer import BaseTrainer

    for package in pkgutil.iter_modules(libreyolo.models.__path__):
        if package.ispkg and importlib.util.find_spec(f"libreyolo.models.{package.name}.trainer"):
            importlib.import_module(f"libreyolo.models.{package.name}.trainer")
    classes, captured = [BaseTrainer], set()
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        if cls.cuda_graph_train_spec is not BaseTrainer.cuda_graph_train_spec and cls.__module__.endswith(".trainer"):
            captured.add(cls.__module__.split(".")[2])
    # their specifications are None: PP-LiteSeg's and UNet's networks lack the two methods, DINOv2's trainer serves the classifier task
    assert captured - {"ppliteseg", "unet", "dinov2", "vjepa2"} == set(RECIPE)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.key)
def test_a_declaration_is_complete(family: Training) -> None:
    assert family.mechanism in ("network", "encoder", "classifier", "semantic", "restore", "point")
    assert family.seam
    assert family.other_size != family.size
    assert set(family.arms) == {"graphed", "native"} if family.zoo == "libreyolo" else {"graphed"}
    assert len(family.rows()) == 3 * len(family.arms)
    for arm, expects in family.expected.items():
        assert arm in family.arms
        for expect in expects:
            assert expect.verdict in VERDICTS
            assert expect.cause in CAUSES


def test_torchvision_trains_one_of_every_module_with_classifiers(warmed: None) -> None:
    from torchvision.models import get_model_builder

    def module(name: str) -> str:
        return str(get_model_builder(name).__module__)

    assert {module(n) for n in TRAINED} == {module(n) for n in (*CONVOLUTIONAL, *WINDOWED, *FIXED, *INCEPTION)}


@pytest.mark.parametrize("key", FAMILIES)
def test_batches_are_alike_for_equal_arguments_only(key: str) -> None:
    family = FAMILIES[key]
    chosen = settings(family)
    first = family.draw(chosen, "A", 0)
    assert all(same(a, b) for a, b in zip(first, family.draw(chosen, "A", 0), strict=True))
    for other in (family.draw(chosen, "B", 0), family.draw(chosen, "A", 1)):
        assert not any(same(a, b) for a, b in zip(first, other, strict=True))
    assert {len(x) for x in first} == {family.batch}
    assert first[0].shape == (family.batch, 3, family.size, family.size)


@pytest.mark.parametrize("module", ["yolox", "yolo9"])
def test_boxes_lie_within_the_image_and_padding_is_what_the_loaders_pad_with(module: str) -> None:
    family = FAMILIES[f"libreyolo/{module}/detect"]
    pixels = module == "yolox"
    for seed in range(20):
        _, targets = family.draw(settings(family), "A", seed)
        real = targets[..., 3] > 0
        assert bool((real.sum(1) >= 1).all())
        assert bool((targets[~real] == torch.tensor([0.0 if pixels else -1.0, 0, 0, 0, 0])).all())
        found = targets[real]
        low, high = (found[:, 1:3] - found[:, 3:] / 2, found[:, 1:3] + found[:, 3:] / 2) if pixels else (found[:, 1:3], found[:, 3:])
        edge = family.size if pixels else 1
        assert bool((low >= -1e-4 * edge).all())
        assert bool((high <= (1 + 1e-4) * edge).all())
        assert bool((high - low > 0.1 * edge).all())


@pytest.mark.parametrize("key", CHOSEN)
def test_a_family_builds_alike_and_its_step_is_finite(key: str, alone: Any) -> None:
    family = FAMILIES[key]
    first, second = built(family), built(family)
    state = dict(first.module.named_parameters()) | dict(first.module.named_buffers())
    others = dict(second.module.named_parameters()) | dict(second.module.named_buffers())
    assert state.keys() == others.keys()
    assert all(same(state[name], tensor) for name, tensor in others.items())
    assert {p.device.type for p in first.module.parameters()} == {"cpu"}
    assert first.module.training

    losses = []
    for probe in "AB":
        ours, theirs = step(first, family.draw(settings(family), probe, 0)), step(second, family.draw(settings(family), probe, 0))
        assert same(ours[0], theirs[0])
        assert ours[1].keys() == theirs[1].keys()
        assert all(same(grad, theirs[1][name]) for name, grad in ours[1].items())
        assert bool(torch.isfinite(ours[0])), "the loss is not finite"
        assert all(bool(torch.isfinite(grad).all()) for grad in ours[1].values())
        assert any(bool(grad.any()) for grad in ours[1].values()), "no gradient moves anything"
        losses.append(ours[0])
    assert not same(losses[0], losses[1]), "the loss does not depend on the batch"
    if family.other_size is not None:
        assert bool(torch.isfinite(step(first, family.draw(settings(family, family.other_size), "A", 0))[0]))
    assert list(alone.iterdir()) == [], "a builder left files in the current folder"


def test_a_head_that_is_made_of_zeros_is_drawn_anew(warmed: None) -> None:
    module = built(FAMILIES["torchvision/vit_b_16/classify"]).module
    assert all(bool(p.any()) for n, p in module.named_parameters() if n.endswith("weight")), "nothing before it would get a gradient"


@pytest.mark.parametrize("module", ["yolox", "deimv2", "mobilenetv4", "segformer", "fomo"])
def test_the_step_is_the_trainers_own(module: str, alone: Any) -> None:
    recipe = RECIPE[module]
    family = FAMILIES[f"libreyolo/{module}/{recipe.task}"]
    subject = built(family)
    torch.manual_seed(0)
    random.seed(0)
    trainer = trainer_of(recipe, settings(family))
    images, targets = family.draw(settings(family), "A", 0)
    loss, grads = step(subject, (images, targets))
    torch.manual_seed(1)
    total = trainer.on_forward(images, targets)["total_loss"]
    total.backward()
    assert same(loss, total.detach())
    theirs = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    assert theirs.keys() == grads.keys()
    assert all(same(grad, theirs[name]) for name, grad in grads.items())


@pytest.mark.skipif(not EVERY, reason="its decoder takes half a minute on the host")
def test_domedetr_is_cut_where_its_own_trainer_cannot_be_cut(alone: Any) -> None:
    recipe = RECIPE["domedetr"]
    family = FAMILIES["libreyolo/domedetr/detect"]
    small = settings(family, 160)
    batch = family.draw(small, "A", 0)
    loss, grads = step(built(family, 160), batch)
    torch.manual_seed(0)
    random.seed(0)
    trainer = trainer_of(recipe, small)
    assert isinstance(trainer.model, torch.nn.Module)
    torch.manual_seed(1)
    total = trainer.on_forward(*batch)["total_loss"]
    total.backward()
    assert same(loss, total.detach())
    theirs = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    assert theirs.keys() == grads.keys()
    assert all(same(grad, theirs[name]) for name, grad in grads.items())
    assert trainer.cuda_graph_train_spec().network(batch[0]) == (), "the library's cut hands out tensors: use it instead of domedetr.py"
    assert isinstance(built(family, 160).network, domedetr.Encoder)


def placed(family: Training, size: int = 0) -> TrainSubject:
    return built(family, size).to(CUDA)


def on_cuda(batch: tuple[Any, ...]) -> list[torch.Tensor]:
    return [x.to("cuda") for x in batch]


@pytest.mark.parametrize("key", ["libreyolo/fomo/point", "libreyolo/mobilenetv4/classify"])
def test_the_librarys_manager_replays_and_leaves_the_network_as_it_was(key: str, alone: Any) -> None:
    family = FAMILIES[key]
    with device():
        subject, eager = placed(family), placed(family)
        assert subject.native is not None
        native = subject.native()
        assert native.autocast_cache is False
        for i in range(4):
            assert native.ready() == (i > 2)
            batch = on_cuda(family.draw(settings(family), "A", i))
            subject.module.zero_grad()
            loss = subject.loss(native, *batch)
            loss.backward()
            ours = {n: p.grad.clone() for n, p in subject.module.named_parameters() if p.grad is not None}
            theirs = step(eager, tuple(batch))
            assert same(loss.detach(), theirs[0])
            assert all(same(grad, theirs[1][name]) for name, grad in ours.items())
        assert native.reason() == ""
        assert "forward" not in vars(subject.network), "the manager rebound the forward of the network that eager steps run"


class Refused(torch.nn.Module):
    """Asks the device for a number in every forward, as Dome-DETR's density head does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images * self.scale
        return images / images.max() if images.max() > 0 else images


def test_a_capture_of_the_library_that_is_refused_says_why(warmed: None) -> None:
    from libreyolo.training.cuda_graph import CudaGraphTrainSpec, GraphableNetwork

    class Trainer:
        _cuda_graph_manager: Any = None

        def __init__(self, network: torch.nn.Module) -> None:
            self.network = network

        def cuda_graph_train_spec(self) -> CudaGraphTrainSpec:
            return CudaGraphTrainSpec(GraphableNetwork(self.network), lambda *args: {})

    with device():
        for network, refused in ((Refused(), True), (torch.nn.Conv2d(3, 1, 1), False)):
            native = manager.NativeTraining(Trainer(network.to("cuda")), GraphableNetwork(network))
            for i in range(4):
                assert native.reason() == "" or i == 3
                native(torch.rand(2, 3, 8, 8, device="cuda"))[0].sum().backward()
            assert native.ready() != refused
            assert ("images.max() > 0" in native.reason()) == refused


def test_yolox_switches_its_l1_branch_on_midway(alone: Any) -> None:
    family = FAMILIES["libreyolo/yolox/detect"]
    small = settings(family, 64)
    with device():
        subject, eager = placed(family, 64), placed(family, 64)
        assert subject.native is not None
        assert subject.switch is not None
        assert eager.switch is not None
        native = subject.native()
        for i in range(8):
            if i == 4:
                assert native.ready()
                before = len(tree.flatten(native(on_cuda(family.draw(small, "A", 0))[0]))[0])
                eager.network(on_cuda(family.draw(small, "A", 0))[0])
                subject.switch()
                eager.switch()
                assert not native.ready(), "the manager would replay the network without the branch"
            batch = tuple(on_cuda(family.draw(small, "A", i)))
            loss = subject.loss(native, *batch)
            assert same(loss.detach(), step(eager, batch)[0])
        assert native.ready()
        assert len(tree.flatten(native(batch[0]))[0]) == before + 3


def test_placing_moves_the_criterion_too(alone: Any) -> None:
    family = FAMILIES["libreyolo/fomo/point"]
    with device():
        subject = placed(family)
        assert {p.device.type for p in subject.module.parameters()} == {"cuda"}
        assert bool(torch.isfinite(step(subject, tuple(on_cuda(family.draw(settings(family), "A", 0))))[0]))
        subject.module.to("cpu")
        with pytest.raises(RuntimeError, match="device"):  # FOMO's class weights stay behind
            step(subject, family.draw(settings(family), "A", 0))
