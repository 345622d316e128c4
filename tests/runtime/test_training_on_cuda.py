"""TrainGraphs on a device: the kernels, streams, allocator and generators that the emulated engine only stands in for.

Each case runs on the emulated engine too where no device is, so that its own logic is tested there."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from parity.runtime import GraphRunner, TrainGraphs, gradients, rng
from parity.runtime.cuda import CudaEngine
from parity.runtime.emulated import device
from parity.runtime.state import same_bits

from .steps import Body, Log, differing, fresh, images, state, update

REAL = torch.cuda.is_available()
needs_device = pytest.mark.skipif(not REAL, reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _engine() -> Iterator[None]:
    deterministic, benchmark, threads = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.get_num_threads()
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    if not REAL:
        torch.set_num_threads(1)
    with nullcontext() if REAL else device():
        yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark
    gc.collect()


class ConvNet(nn.Module):
    """BatchNorm, dropout, two heads of which one reads what the other does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU())
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout2d(0.1))
        self.drop = nn.Dropout(0.3)
        self.box, self.score = nn.Conv2d(32, 4, 1), nn.Linear(32, 5)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.body(self.stem(x))
        return {"box": self.box(x), "score": self.score(self.drop(x.mean((2, 3))))}


class Transformer(nn.Module):
    """A block with attention (its own dropout included), on patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, stride=4)
        self.norms = nn.ModuleList([nn.LayerNorm(32), nn.LayerNorm(32)])
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
        self.box, self.score = nn.Linear(32, 4), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.patch(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norms[1](x))
        return {"box": self.box(x), "score": self.score(x.mean(1))}


def objective(out: dict[str, Tensor]) -> Tensor:
    wanted = torch.arange(len(out["score"]), device="cuda") % 5
    return out["box"].float().square().mean() + F.cross_entropy(out["score"].float(), wanted)


def steps(dtype: torch.dtype | None = None, batches: tuple[tuple[int, int], ...] = ((4, 16),) * 9) -> Body:
    """Forward, backward and a bare update; ``batches``: (images, edge)."""

    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        logs = []
        for i, (batch, size) in enumerate(batches):
            owner.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=dtype) if dtype is not None else nullcontext():
                out = net(images(i, batch, size))
                loss = objective(out)
            loss.backward()
            logs.append([("loss", loss.detach().clone()), *((k, v.detach().clone()) for k, v in out.items()), *state(owner)])
            update(owner)
        return logs

    return body


def run(kind: Callable[[], nn.Module], body: Body, graphed: bool, **options: Any) -> tuple[list[Log], TrainGraphs | None, list[str]]:
    lines: list[str] = []
    net = fresh(kind)
    graphs = TrainGraphs(net, log=lines.append, **options) if graphed else None
    torch.manual_seed(1)
    return body(graphs or net, net), graphs, lines


def compared(kind: Callable[[], nn.Module], body: Body, **options: Any) -> tuple[list[str], TrainGraphs, list[str]]:
    """What a graphed run gives other bits for than an eager one. The very first run counts nowhere; eager must repeat itself."""
    if REAL:
        run(kind, body, False)
    expected, _, _ = run(kind, body, False)
    if REAL:
        assert differing(run(kind, body, False)[0], expected) == []
    found, graphs, lines = run(kind, body, True, **options)
    assert graphs is not None
    return differing(found, expected), graphs, lines


KINDS = {"convolutions": ConvNet, "attention": Transformer}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[type[nn.Module]]:
    with sdpa_kernel(SDPBackend.MATH):
        yield KINDS[request.param]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def test_steps(kind: type[nn.Module], dtype: torch.dtype | None) -> None:
    different, graphs, lines = compared(kind, steps(dtype))
    assert different == []
    assert (graphs.captures, graphs.replays, lines) == (1, 6, [])


def test_a_changed_shape_midway_and_back(kind: type[nn.Module]) -> None:
    batches = (*[(4, 16)] * 5, (3, 16), *[(4, 24)] * 5, *[(4, 16)] * 2, (4, 24))
    different, graphs, lines = compared(kind, steps(torch.bfloat16, batches))
    assert different == []
    assert (graphs.captures, graphs.replays, lines) == (2, 7, [])


def everything(every: int) -> Body:
    """Scaler, clipping, accumulation, average, evaluation between the steps."""

    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        optimizer = torch.optim.AdamW(owner.parameters(), lr=0.01, **({"fused": True} if REAL else {}))
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**22, growth_interval=3)  # overflows at first
        average, logs = copy.deepcopy(owner).eval(), []
        for i in range(12):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = objective(net(images(i, 4, 16))) / every
            scaler.scale(loss).backward()
            logs.append([("loss", loss.detach().clone()), *state(owner)])
            if (i + 1) % every:
                continue
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(owner.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                for mine, theirs in zip(average.state_dict().values(), owner.state_dict().values(), strict=True):
                    if mine.is_floating_point():
                        mine.mul_(0.9).add_(theirs, alpha=0.1)
                owner.eval()
                logs.append([("scale", torch.tensor(scaler.get_scale())), ("eval", net(images(90, 4, 16))["box"].clone())])
                owner.train()
                logs.append([("average", average(images(91, 4, 16))["box"].clone())])
        return logs

    return body


@pytest.mark.parametrize("every", [1, 2])
def test_scaler_clipping_accumulation_average_evaluation(kind: type[nn.Module], every: int) -> None:
    different, graphs, lines = compared(kind, everything(every))
    assert different == []
    assert graphs.replays == 9
    assert lines == []


def test_gradients_of_several_shapes_add_up() -> None:
    """Both graphs are there when they take turns within one accumulation: neither may write where the other's gradients lie."""

    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        logs = []
        for i, size in enumerate((*[24] * 4, *[16] * 4, *[16, 24, 24, 16, 16, 24] * 2)):
            if i % 3 == 0:
                owner.zero_grad(set_to_none=True)
            objective(net(images(i, 4, size))).backward()
            logs.append(state(owner))
        return logs

    different, graphs, lines = compared(ConvNet, body)
    assert different == []
    assert (graphs.captures, graphs.replays, lines) == (2, 14, [])


# ---------------------------------------------------------------- failures
class Uploading(ConvNet):
    """Copies from the host at one size, which no capture survives."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if x.shape[-1] == 24:
            x = x * torch.tensor([1.0, 2.0, 3.0], device=x.device).reshape(3, 1, 1)
        return super().forward(x)


def test_a_capture_that_fails_midway_goes_on_with_eagers_numbers() -> None:
    batches = (*[(4, 16)] * 5, *[(4, 24)] * 4, *[(4, 16)] * 3)
    different, graphs, lines = compared(Uploading, steps(torch.bfloat16, batches))
    assert different == []  # dropout after the failure included: the generator was repaired
    assert (graphs.captures, graphs.replays, len(lines)) == (1, 2, 1)
    assert "h2d-copy" in lines[0]


class Noise(nn.Module):
    """Draws in a forward: what it gives tells where the generator stands."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.mix(x), 0.5, training=True)


@pytest.mark.parametrize("kind", [ConvNet, Uploading], ids=["after a capture", "after a failed capture"])
def test_inference_captured_before_still_follows_eagers_stream(kind: type[nn.Module]) -> None:
    """A graphed forward that draws, called between steps: the same stream as an eager run of the whole."""
    noise = fresh(Noise, seed=5)
    x = torch.ones(64, 8, device="cuda")
    batches = (*[(4, 16)] * 5, *[(4, 24)] * 5)

    def body(between: Callable[..., Tensor]) -> Body:
        def inner(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
            logs = []
            with torch.no_grad():
                logs.append([("noise", between(x).clone())])
            for i, (batch, size) in enumerate(batches):
                owner.zero_grad(set_to_none=True)
                objective(net(images(i, batch, size))).backward()
                with torch.no_grad():
                    logs.append([("noise", between(x).clone()), *state(owner)])
            return logs

        return inner

    expected, _, _ = run(kind, body(noise), False)
    if REAL:
        expected, _, _ = run(kind, body(noise), False)
    runner = GraphRunner(noise)
    found, graphs, lines = run(kind, body(runner), True)
    assert differing(found, expected) == []
    assert graphs is not None
    assert graphs.captures == (1 if kind is Uploading else 2)
    assert len(lines) == (kind is Uploading)
    assert runner.info().captures == (2 if kind is Uploading else 1)  # dropped with the generator state that it followed
    assert runner.info().replays == len(batches) + 1


# ---------------------------------------------------------------- what only a device shows
@needs_device
def test_a_loader_that_pins_memory_runs_through_captures() -> None:
    data = TensorDataset(torch.randn(96, 3, 40, 40, generator=torch.Generator().manual_seed(3)))

    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        logs = []
        for i, (x,) in enumerate(DataLoader(data, batch_size=4, num_workers=2, pin_memory=True)):
            owner.zero_grad(set_to_none=True)
            x = x.to("cuda", non_blocking=True)[..., : 16 + 8 * (i // 6)].contiguous()  # captured anew while the next ones are pinned
            objective(net(x)).backward()
            logs.append(state(owner))
        return logs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # workers fork from a process with threads
        different, graphs, lines = compared(ConvNet, body)
    assert different == []
    assert (graphs.captures, graphs.replays, lines) == (4, 12, [])


@needs_device
def test_lent_gradients_keep_their_values_while_cudnn_measures() -> None:
    torch.backends.cudnn.benchmark = True
    net = fresh(ConvNet)
    graphs = TrainGraphs(net)
    for i in range(6):
        net.zero_grad(set_to_none=True)
        objective(graphs(images(i, 4, 16))).backward()
    (recording,) = graphs._recordings.values()
    used = [p for n, p in net.named_parameters() if not n.startswith("spare")]
    grads = [p.grad for p in used if p.grad is not None]
    assert len(CudaEngine().allocated_by([recording.backward], grads)) > len(grads) // 2
    before = [g.clone() for g in grads]
    for size in (18, 20, 22, 26, 34):  # algorithms are measured, workspaces come and go
        torch.autograd.grad(objective(net(images(size, 4, size))), used)
    torch.cuda.synchronize()
    assert all(map(same_bits, grads, before))


@needs_device
def test_peak_memory_stays_beside_eagers() -> None:
    peaks = []
    for graphed in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        run(ConvNet, steps(None, ((16, 128),) * 8), graphed)
        peaks.append(torch.cuda.max_memory_allocated() - start)
    assert peaks[1] < 2.5 * peaks[0]


# ---------------------------------------------------------------- the comparisons can fail
def test_a_doubled_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients.Handout, "settle", lambda self: True)
    different, _, _ = compared(ConvNet, everything(2))
    assert any("grad:" in name for name in different)


def test_a_generator_that_is_not_put_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _, _ = run(ConvNet, steps(), False)
    monkeypatch.setattr(rng, "restore", lambda streams: None)
    found, _, _ = run(ConvNet, steps(), True)
    assert any("generator" in name for name in differing(found, expected))
