"""The device as user code meets it: what tensors say, transfers, torch.cuda, random numbers, entering and leaving."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from parity.runtime.emulated import device, is_marked
from parity.runtime.emulated.memory import BLOCK
from parity.runtime.emulated.patches import patches
from parity.runtime.engine import EMULATED_MARK


@pytest.fixture
def on_device() -> Iterator[None]:
    torch.manual_seed(0)
    with device():
        torch.cuda.manual_seed(0)
        yield


# ---------------------------------------------------------------- what a tensor says
@pytest.mark.usefixtures("on_device")
def test_a_device_tensor_says_so() -> None:
    x = torch.zeros(2, device="cuda")
    assert x.device == torch.device("cuda", 0)
    assert x.is_cuda
    assert not x.is_cpu
    assert x.get_device() == 0
    assert x.type() == "torch.cuda.FloatTensor"
    assert "cuda:0" in repr(x)
    host = torch.zeros(2)
    assert host.device == torch.device("cpu")
    assert not host.is_cuda
    assert host.is_cpu


@pytest.mark.usefixtures("on_device")
def test_results_views_and_gradients_stay_on_the_device() -> None:
    x = torch.randn(4, 3, device="cuda", requires_grad=True)
    for y in (
        x + 1,
        x[0],
        x.t(),
        x.data,
        x.detach(),
        x @ x.t(),
        F.softmax(x, 1),
        torch.stack([x, x]),
        x.new_zeros(2),
        torch.zeros_like(x),
    ):
        assert y.is_cuda
    (x * x).sum().backward()
    assert x.grad is not None
    assert x.grad.is_cuda


@pytest.mark.usefixtures("on_device")
def test_the_mark_is_seen_inside_a_dispatch_mode() -> None:
    seen: list[tuple[str, bool]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            seen.append((func.name(), is_marked(args[0])))
            return out

    x, host = torch.ones(2, device="cuda"), torch.ones(2)
    with Watch():
        _ = x * 2, host + 1
    assert seen == [("aten::mul.Tensor", True), ("aten::add.Tensor", False)]


def test_the_mark_has_one_name() -> None:
    assert EMULATED_MARK == BLOCK


def test_the_mark_outlives_the_device() -> None:
    with device():
        x = torch.ones(2, device="cuda")
        host = torch.ones(2)
    assert is_marked(x)
    assert not is_marked(host)


@pytest.mark.usefixtures("on_device")
def test_mixed_devices_are_refused_and_numbers_are_not() -> None:
    x = torch.ones(2, device="cuda")
    assert (x * torch.tensor(2.0)).is_cuda
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        torch.tensor(0.0).add_(x.sum())
    with pytest.raises(RuntimeError, match="indices should be"):
        torch.ones(2)[torch.zeros(1, dtype=torch.long, device="cuda")]


# ---------------------------------------------------------------- transfers
@pytest.mark.usefixtures("on_device")
def test_transfers_copy_between_and_return_the_same_within() -> None:
    host = torch.arange(3.0)
    x = host.to("cuda")
    host.add_(1)
    assert x.tolist() == [0, 1, 2]
    assert x.to("cuda") is x
    assert x.cuda() is x
    assert x.to(x) is x
    assert x.to(torch.float32) is x
    assert x.to("cuda", torch.float64).dtype == torch.float64
    assert x.to("cuda", torch.float32, False, True) is not x
    back = x.to("cpu", non_blocking=True)
    assert not back.is_cuda
    assert back.is_pinned()
    assert torch.ones(2).type_as(x).is_cuda
    assert not x.cpu().is_cuda
    assert x.to(device="cpu", dtype=torch.int64).tolist() == [0, 1, 2]


@pytest.mark.usefixtures("on_device")
def test_gradients_travel_back_through_a_transfer() -> None:
    host = torch.ones(3, requires_grad=True)
    (host.cuda() * 2).sum().backward()
    assert host.grad is not None
    assert not host.grad.is_cuda
    assert host.grad.tolist() == [2, 2, 2]
    x = torch.ones(3, device="cuda", requires_grad=True)
    (x.cpu() * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.is_cuda


@pytest.mark.usefixtures("on_device")
def test_tensors_from_python_values() -> None:
    x = torch.zeros(2, device="cuda")
    for y in (
        torch.tensor([1.0], device="cuda"), torch.tensor([1.0], device=0), torch.as_tensor([1.0], device="cuda:0"), x.new_tensor([1.0]),
        torch.asarray([1.0], device="cuda"), torch.as_tensor(x), torch.tensor(1, device=x.device),
    ):  # fmt: skip
        assert y.is_cuda
    assert torch.as_tensor(x) is x
    assert not torch.tensor([1.0]).is_cuda
    assert torch.tensor([1.0], device="cuda", requires_grad=True).is_leaf
    with torch.device("cuda"):
        assert torch.tensor([1.0]).is_cuda
        assert torch.zeros(2).is_cuda
        assert nn.Linear(2, 2).weight.is_cuda
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


@pytest.mark.usefixtures("on_device")
def test_modules_move_and_parameters_keep_their_identity() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    before = list(net.parameters())
    assert net.cuda() is net
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    assert all(t.is_cuda for t in [*net.parameters(), *net.buffers()])
    assert all(type(p) is nn.Parameter for p in net.parameters())
    twin = copy.deepcopy(net)
    assert all(t.is_cuda for t in [*twin.parameters(), *twin.buffers()])
    assert not any(t.is_cuda for t in net.cpu().parameters())
    net.to(device="cuda", memory_format=torch.channels_last)
    assert all(t.is_cuda for t in [*net.parameters(), *net.buffers()])
    assert not next(net.to(device=torch.device("cpu")).parameters()).is_cuda


@pytest.mark.usefixtures("on_device")
def test_a_training_step_equals_the_hosts() -> None:
    def train(where: str) -> list[list[float]]:
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Linear(5, 32), nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.AvgPool2d(2),
            nn.Hardswish(), nn.Flatten(), nn.Linear(16, 7), nn.LayerNorm(7), nn.GELU(), nn.Mish(), nn.Linear(7, 2),
        )  # fmt: skip
        data = torch.randn(8, 5)
        net.to(where)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(net(data.to(where)), torch.arange(8).to(where) % 2).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        return [p.detach().cpu().flatten().tolist() for p in net.parameters()]

    assert train("cuda") == train("cpu")


@pytest.mark.usefixtures("on_device")
def test_files_remember_the_device() -> None:
    layer = nn.Linear(2, 2).cuda()
    for where, expected in ((None, True), ("cuda", True), (torch.device("cuda", 0), True), ("cpu", False)):
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        state = torch.load(file, map_location=where)
        assert [t.is_cuda for t in state.values()] == [expected, expected]
    assert torch.equal(torch.load(_saved(layer.weight)), layer.weight)


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.usefixtures("on_device")
def test_a_scaler_steps() -> None:
    layer, scaler = nn.Linear(3, 3).cuda(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = layer.weight.tolist()
    with torch.autocast("cuda"):
        loss = layer(torch.ones(2, 3, device="cuda")).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536.0
    assert layer.weight.tolist() != before


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_pin(workers: int) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True, num_workers=workers)
    for (batch,) in loader:
        assert batch.is_pinned()
        assert batch.to("cuda", non_blocking=True).is_cuda


@pytest.mark.usefixtures("on_device")
def test_compiled_functions_run_eagerly() -> None:
    assert torch.compile(lambda t: t * 2, backend="eager")(torch.ones(2, device="cuda")).tolist() == [2, 2]


@pytest.mark.usefixtures("on_device")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_scripted_modules_run() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).cuda()
    x = torch.ones(2, 3, device="cuda")
    out = torch.jit.script(net)(x)
    assert out.is_cuda
    assert torch.equal(out, net(x))


@pytest.mark.usefixtures("on_device")
def test_what_it_cannot_hold_it_says() -> None:
    with pytest.raises(NotImplementedError, match="strided tensors only"):
        torch.eye(3, device="cuda").to_sparse()


# ---------------------------------------------------------------- torch.cuda
@pytest.mark.usefixtures("on_device")
def test_torch_cuda_answers() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_name() == "emulated"
    assert torch.accelerator.current_accelerator() == torch.device("cuda", 0)
    with torch.cuda.device(0), torch.cuda.device(torch.device("cuda", 0)):
        torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0
    assert not torch.cuda.is_current_stream_capturing()
    x = torch.ones(2, device="cuda")
    x.record_stream(torch.cuda.current_stream())


@pytest.mark.usefixtures("on_device")
def test_streams_nest_and_come_back() -> None:
    default, a, b = torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    assert torch.cuda.current_stream() == default
    with torch.cuda.stream(a):
        with torch.cuda.stream(None), b:
            assert torch.cuda.current_stream() is b
        assert torch.cuda.current_stream() is a
    assert torch.cuda.current_stream() is default
    assert isinstance(a, torch.cuda.Stream)
    assert len({default, a, b}) == 3


@pytest.mark.usefixtures("on_device")
def test_memory_is_counted() -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = torch.zeros(1000, device="cuda")
    view = x[10:]
    assert torch.cuda.memory_allocated() - before == 4000
    del x
    assert torch.cuda.memory_allocated() - before == 4000
    del view
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 4000
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total


@pytest.mark.usefixtures("on_device")
def test_autocast() -> None:
    x, weight = torch.randn(2, 3, device="cuda"), torch.randn(4, 3, device="cuda")
    with torch.autocast("cuda"):
        assert torch.is_autocast_enabled("cuda")
        assert F.linear(x, weight).dtype == torch.float16
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.autocast("cuda", enabled=False):
        assert F.linear(x, weight).dtype == torch.float32
    assert not torch.is_autocast_enabled("cuda")


# ---------------------------------------------------------------- random numbers
@pytest.mark.usefixtures("on_device")
def test_device_and_host_draw_apart() -> None:
    torch.manual_seed(5)
    host = torch.rand(3).tolist()
    torch.manual_seed(5)
    torch.rand(7, device="cuda")
    assert torch.rand(3).tolist() == host


@pytest.mark.usefixtures("on_device")
def test_seeds_and_states() -> None:
    torch.manual_seed(5)
    state = torch.cuda.get_rng_state()
    a = torch.rand(3, device="cuda").tolist()
    assert torch.rand(3, device="cuda").tolist() != a
    torch.cuda.set_rng_state(state)
    assert torch.rand(3, device="cuda").tolist() == a
    torch.cuda.manual_seed_all(5)
    assert torch.rand(3, device="cuda").tolist() == a
    assert torch.cuda.initial_seed() == 5
    with torch.random.fork_rng():
        torch.rand(9, device="cuda")
    after = torch.cuda.get_rng_state_all()
    assert after[0].tolist() != state.tolist()


@pytest.mark.usefixtures("on_device")
def test_generators_share_and_clone_their_state() -> None:
    default = torch.cuda.default_generators[0]
    clone, shared = default.clone_state(), default.graphsafe_get_state()
    a = torch.rand(3, device="cuda").tolist()
    assert shared.get_offset() == default.get_offset() != clone.get_offset()
    default.graphsafe_set_state(clone)
    assert torch.rand(3, device="cuda").tolist() == a
    default.set_offset(clone.get_offset() - 4)
    assert torch.rand(3, device="cuda").tolist() == a
    with pytest.raises(RuntimeError, match="multiple of 4"):
        default.set_offset(3)
    with pytest.raises(RuntimeError, match="wrong size"):
        default.set_state(torch.get_rng_state())


@pytest.mark.usefixtures("on_device")
def test_a_generator_of_ones_own() -> None:
    generator = torch.Generator("cuda").manual_seed(4)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.Generator(), torch.Generator)
    assert generator.device.type == "cuda"
    before = torch.cuda.get_rng_state().tolist()
    a = torch.rand(3, device="cuda", generator=generator).tolist()
    generator.manual_seed(4)
    assert torch.rand(3, device="cuda", generator=generator).tolist() == a
    assert torch.cuda.get_rng_state().tolist() == before
    with pytest.raises(RuntimeError, match="for generator but found 'cpu'"):
        torch.rand(3, device="cuda", generator=torch.Generator())


@pytest.mark.usefixtures("on_device")
def test_checkpointing_draws_the_same_twice() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(64, device="cuda", requires_grad=True)
    y = checkpoint(lambda t: F.dropout(t) * t, x, use_reentrant=False)
    assert isinstance(y, Tensor)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * y.detach())


# ---------------------------------------------------------------- entering and leaving
def _patched() -> dict[tuple[int, str], Any]:
    with device():
        names = [(owner, name) for owner, name, _ in patches()]
    return {(id(owner), name): vars(owner).get(name, "absent") for owner, name in names}


def test_leaving_restores_every_patched_attribute() -> None:
    before = _patched()
    with device():
        changed = [name for owner, name, _ in patches() if vars(owner).get(name, "absent") is not before[id(owner), name]]
        assert len(set(changed)) > 50
    assert _patched() == before

    def fail() -> None:
        with device():
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()).__enter__()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert _patched() == before
    with device():
        assert torch.cuda.current_stream() is torch.cuda.default_stream()
        assert not torch.cuda.is_current_stream_capturing()


def test_nesting() -> None:
    with device():
        with device():
            x = torch.ones(2, device="cuda")
        assert (x + 1).is_cuda
        assert torch.zeros(2, device="cuda").is_cuda
    assert not torch.zeros(2).is_cuda


def test_two_threads_are_refused() -> None:
    caught: list[str] = []

    def enter() -> None:
        try:
            with device():
                pass
        except RuntimeError as error:
            caught.append(str(error))

    with device():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert caught == ["another thread has entered the emulated device; it serves one thread at a time"]


def test_classes_imported_by_name_are_the_emulated_ones() -> None:
    from torch.cuda import CUDAGraph, Event, Stream

    with device():
        assert isinstance(Stream(), torch.cuda.Stream)
        assert isinstance(Event(), torch.cuda.Event)
        assert isinstance(CUDAGraph(), torch.cuda.CUDAGraph)
