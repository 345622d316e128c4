"""LibreYOLO's own ``train()`` with our graphs in place of its manager: the run of an eager one, or one line that says why not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from families.libreyolo.adapter import Manager, parity_graphs
from families.libreyolo.dataset import dataset
from families.libreyolo.finetune import train_once
from parity.judge.bits import same
from parity.runtime.emulated import device

# what a zoo warns of while it is imported or run is not ours to fix
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(torch.nn.Module):
    """Hands out a flat tuple, as the library's specifications do. Moves buffers and draws random numbers."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.conv, self.norm, self.drop = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.drop(self.norm(self.conv(images)))
        if self.kind == "copies":
            out = out + torch.arange(4.0).reshape(4, 1, 1).to(out.device)
        return () if self.kind == "empty" else (out,)


def spec_of(kind: str = "") -> Any:
    torch.manual_seed(0)
    return SimpleNamespace(network=Net(kind).to("cuda").train())


def images(i: int) -> torch.Tensor:
    return torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(i)).to("cuda")


def steps(spec: Any, forward: Any, count: int) -> list[torch.Tensor]:
    """Losses and gradients of ``count`` steps; where ``forward`` gives None, of the network itself, as the trainer does it."""
    torch.cuda.manual_seed(3)
    found = []
    for i in range(count):
        flat = forward(images(i))
        loss = (spec.network(images(i)) if flat is None else flat)[0].square().mean()
        spec.network.zero_grad()
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in spec.network.parameters())]
    return [*found, *(b.clone() for b in spec.network.buffers()), torch.cuda.get_rng_state()]


def manager_of(lines: list[str], **options: Any) -> Manager:
    return Manager("Net-s", lines.append, options)


def test_the_manager_captures_at_the_fourth_batch_and_gives_eagers_bits() -> None:
    lines: list[str] = []
    with device():
        eager, spec = spec_of(), spec_of()
        manager = manager_of(lines)
        captured = []

        def run(batch: torch.Tensor) -> Any:
            flat = manager.run(spec, batch)
            captured.append(manager.captured)
            return flat

        ours = steps(spec, run, 6)
        assert all(same(a, b) for a, b in zip(ours, steps(eager, eager.network, 6), strict=True))
        assert captured == [False, False, False, True, True, True]
        assert (manager.graphs.replays, manager.disabled, lines) == (3, False, [])
        manager.invalidate("a branch was switched on")
        assert manager.run(spec, images(0)) is not None
        assert manager.graphs.replays == 3, "a graph from before the switch was replayed"


def test_a_network_that_cannot_be_captured_costs_one_line_and_no_bit() -> None:
    lines: list[str] = []
    with device():
        eager, spec = spec_of("copies"), spec_of("copies")
        manager = manager_of(lines)
        ours = steps(spec, lambda batch: manager.run(spec, batch), 6)
        assert all(same(a, b) for a, b in zip(ours, steps(eager, eager.network, 6), strict=True))
        assert manager.disabled
        assert manager.run(spec, images(0)) is None
    (line,) = lines
    assert line.startswith("cuda_graph: Net-s trains eagerly from here on")
    assert "h2d-copy" in line
    assert "torch.arange(4.0)" in line


def test_a_specification_that_hands_out_nothing_leaves_no_trace() -> None:
    lines: list[str] = []
    with device():
        eager, spec = spec_of(), spec_of("empty")
        manager = manager_of(lines)
        whole = spec_of()  # what the trainer calls instead: its own forward, which loses nothing
        whole.network.load_state_dict(spec.network.state_dict())
        torch.cuda.manual_seed(3)
        before = torch.cuda.get_rng_state()
        buffers = [b.clone() for b in spec.network.buffers()]
        assert manager.run(spec, images(0)) is None
        assert same(torch.cuda.get_rng_state(), before)
        assert all(same(a, b) for a, b in zip(spec.network.buffers(), buffers, strict=True))
        spec.network(images(0))
        assert not same(torch.cuda.get_rng_state(), before), "the network draws nothing: this test would see nothing"
        assert not all(same(a, b) for a, b in zip(spec.network.buffers(), buffers, strict=True))
        assert all(same(a, b) for a, b in zip(steps(whole, whole.network, 2), steps(eager, eager.network, 2), strict=True))
    assert [("hands out nothing" in line, "Net-s" in line) for line in lines] == [(True, True)]


def test_what_no_certificate_covers_is_not_captured_where_one_is_asked_for(tmp_path: Path) -> None:
    from parity.runtime.identity import Identity

    listed = tmp_path / "allowlist.json"
    listed.write_text((Path(__file__).parents[2] / "reports" / "SUPPORTS_CUDA_GRAPH.json").read_text())
    lines: list[str] = []
    with device():
        spec = spec_of()
        manager = manager_of(lines, identity=Identity("libreyolo", "nobody", "detect"), allowlist=listed)
        assert manager.run(spec, images(0)) is not None
        assert manager.disabled
    assert ["parity certify" in line for line in lines] == [True]


def stub(**more: Any) -> Any:
    from libreyolo.training.trainer import BaseTrainer

    class Trainer(BaseTrainer):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            self.config = SimpleNamespace(cuda_graph=True, amp_dtype="float16")
            self.device, self.is_distributed, self.distiller = torch.device("cuda"), False, None
            self._cuda_graph_manager = None
            self.__dict__.update(more)

        _accum_steps = 1

        def get_model_tag(self) -> str:
            return "stub"

    Trainer.__abstractmethods__ = frozenset()
    return Trainer()


@pytest.mark.parametrize("change", [{"device": torch.device("cpu")}, {"is_distributed": True}, {"distiller": object()}])
def test_runs_that_the_library_leaves_eager_stay_its_own(change: dict[str, Any], warmed: None) -> None:
    with parity_graphs() as runs:
        trainer = stub(**change)
        trainer._start_cuda_graph_manager()
        assert trainer._cuda_graph_manager is None
        trainer = stub()
        trainer._start_cuda_graph_manager()
        assert runs.managers == [trainer._cuda_graph_manager]


def test_autocast_keeps_its_weight_cache_and_everything_is_put_back(warmed: None) -> None:
    from libreyolo.training.trainer import BaseTrainer
    from libreyolo.validation.base import BaseValidator

    names = [(BaseTrainer, "_start_cuda_graph_manager"), (BaseTrainer, "_autocast_context"), (BaseValidator, "_capture_val_graph")]
    before = [vars(owner)[name] for owner, name in names]
    with device():
        trainer = stub()

        def broken() -> None:
            with parity_graphs():
                trainer._start_cuda_graph_manager()
                with trainer._autocast_context():
                    assert torch.is_autocast_enabled("cuda")
                    assert torch.is_autocast_cache_enabled()
                assert isinstance(trainer._cuda_graph_manager, Manager)
                raise KeyError("mid-run")

        with pytest.raises(KeyError, match="mid-run"):
            broken()
        assert [vars(owner)[name] for owner, name in names] == before
        with trainer._autocast_context():
            assert not torch.is_autocast_cache_enabled(), "the library leaves the cache on beside a manager: the adapter need not"


def test_a_fine_tune_on_generated_images_is_the_eager_one_bit_for_bit(alone: Any) -> None:
    with device():
        runs = {graphs: train_once("fomo", graphs, epochs=2, images=14) for graphs in ("off", "parity")}
        other = train_once("fomo", "off", epochs=1, images=14, seed=1)
    eager, ours = runs["off"], runs["parity"]
    assert ours.differs(eager) == []
    assert set(other.differs(eager)) >= {"steps", "weights"}, "another seed gives the same run: this test would see nothing"
    assert (len(eager.steps), len(eager.epochs), len(eager.metrics)) == (len(ours.steps), 2, 2)
    assert (eager.captured, ours.captured, ours.reason) == (False, True, "")
    assert ours.replays is not None
    assert ours.replays >= 2
    assert list(alone.iterdir()) == [], "a run left files in the current folder"


@pytest.mark.parametrize(("wrong", "message"), [({"graphs": "ours"}, "parity, upstream"), ({"family": "yolo1"}, "yolo1")])
def test_what_is_unknown_is_named(wrong: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_once(**{"family": "fomo", **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["detect", "point", "classify", "semantic", "restore"])
def test_data_sets_are_alike_for_equal_arguments(task: str, tmp_path: Path, warmed: None) -> None:
    def content(folder: Path, seed: int) -> dict[str, bytes]:
        dataset(folder, task, 3, 2, seed)
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".yaml"}

    first, again, other = content(tmp_path / "a", 0), content(tmp_path / "b", 0), content(tmp_path / "c", 1)
    assert first == again
    assert first != other
    assert len([name for name in first if name.endswith(".png")]) == (5 if task in ("detect", "point", "classify") else 10)
