"""GraphRunner: what makes a key, what comes out, what is refused and what a failed capture leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from parity.runtime import GraphRunner, tree
from parity.runtime.emulated import device
from parity.runtime.errors import CaptureRefused
from parity.runtime.invalidation import scope
from parity.runtime.state import same_bits
from parity.runtime.validation import second_probe


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with device(), torch.no_grad():
        torch.manual_seed(0)
        yield


def agree(a: Any, b: Any) -> bool:
    (left, spec), (right, other) = tree.flatten(a), tree.flatten(b)
    return spec == other and all(
        same_bits(x, y) if isinstance(x, Tensor) else type(x) is type(y) and repr(x) == repr(y)
        for x, y in zip(left, right, strict=True)
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x)).relu()


def net() -> Net:
    return Net().to("cuda").eval()


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


# ---------------------------------------------------------------- keys
def test_each_shape_has_its_graph_and_further_ones_run_eager() -> None:
    model = net()
    runner = GraphRunner(model, max_graphs=2)
    for rows in (1, 2, 1, 3, 2, 3):
        x = inputs(rows, 4)
        assert agree(runner(x), model(x))
    assert runner.info().captures == 2
    assert runner.info().replays == 4
    assert runner.info().eager == {"more than 2 signatures": 2}


def switched(name: str) -> contextlib.AbstractContextManager[Any]:
    if name == "autocast":
        return torch.autocast("cuda", torch.bfloat16)
    if name == "autocast without cache":
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
    if name == "inference":
        return torch.inference_mode()
    if name == "deterministic":
        return flipped(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms)
    if name == "tf32":
        return flipped(lambda: torch.backends.cuda.matmul.allow_tf32, lambda on: setattr(torch.backends.cuda.matmul, "allow_tf32", on))
    if name == "cudnn":
        return flipped(lambda: torch.backends.cudnn.benchmark, lambda on: setattr(torch.backends.cudnn, "benchmark", on))
    return flipped(torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp)


@contextlib.contextmanager
def flipped(read: Callable[[], bool], write: Callable[[bool], Any]) -> Iterator[None]:
    before = read()
    write(not before)
    try:
        yield
    finally:
        write(before)


@pytest.mark.parametrize("name", ["autocast", "autocast without cache", "inference", "deterministic", "tf32", "cudnn", "math sdp"])
def test_a_global_switch_makes_another_graph(name: str) -> None:
    model, x = net(), inputs(2, 4)
    runner = GraphRunner(model)
    with switched(name):
        pass  # some settings have a third state that nobody has touched yet
    with scope():
        runner(x)
        with switched(name):
            assert agree(runner(x), model(x))
        assert agree(runner(x), model(x))
    assert runner.info().captures == 2
    assert runner.info().replays == 3


def test_the_training_flag_of_a_submodule_makes_another_graph() -> None:
    model, x = net(), inputs(2, 4)
    runner = GraphRunner(model)
    runner(x)
    model.drop.training = True
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert agree(runner(x), expected)
    assert runner.info().captures == 2


def test_scalars_are_told_apart_by_type_and_bits() -> None:
    def scale(x: Tensor, by: Any) -> Tensor:
        return x * by

    runner, x = GraphRunner(scale), inputs(3)
    for by in (1, 1.0, True, 0.0, -0.0, 2.0, 1):
        assert agree(runner(x, by), scale(x, by)), by
        assert agree(runner(x, by=by), scale(x, by=by)), by
    assert runner.info().captures == 12 - 4  # eight graphs at most: the rest ran eager


def test_the_same_object_given_twice_stays_one_object() -> None:
    def told(a: Tensor, b: Tensor) -> Tensor:
        return a * 2 if a is b else a + b

    runner, x = GraphRunner(told), inputs(3)
    for pair in ((x, x), (x, x.clone()), (x, x.view(3)), (x, x)):
        assert agree(runner(*pair), told(*pair))
    assert runner.info().captures == 3


@pytest.mark.parametrize(
    "made",
    [
        lambda: inputs(4, 6).t(),
        lambda: inputs(4, 6)[:, ::2],
        lambda: inputs(1, 6).expand(4, 6),
        lambda: inputs(9).unfold(0, 4, 1),
        lambda: inputs(9)[1:],
        lambda: inputs(0, 3),
        lambda: inputs(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        lambda: inputs(1).squeeze(),
    ],
    ids=["transposed", "strided", "expanded", "windows", "shifted", "empty", "channels_last", "scalar"],
)
def test_the_region_sees_the_callers_geometry(made: Callable[[], Tensor]) -> None:
    seen = []

    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((x.shape, x.stride(), x.data_ptr() % 16))
        return x * 2, x

    runner = GraphRunner(region)
    for _ in range(2):
        x = made()
        out = runner(x)
        assert same_bits(out[0], x * 2)
        assert out[1] is x
        assert set(seen) == {(x.shape, x.stride(), x.data_ptr() % 16)}
    assert runner.info().replays == 2


class Pair(NamedTuple):
    first: Tensor
    second: dict[str, Tensor]


@dataclasses.dataclass
class Boxes:
    xy: Tensor
    note: str = "unset"


@pytest.mark.parametrize(
    "shape",
    [
        lambda x: (x + 1, x + 2),
        lambda x: [x + 1, 3, "word", None],
        lambda x: {"b": x + 1, "a": x + 2},
        lambda x: Pair(x + 1, {"z": x + 2, "y": x * 2}),
        lambda x: Boxes(x + 1, "seen"),
        lambda x: (lambda y: (y, y, y[0], y.t(), y.expand(2, 2, 2)))(x[:2, :2] + 1),
    ],
    ids=["tuple", "list", "dict", "named", "dataclass", "views"],
)
def test_any_nesting_comes_out_as_eager_gives_it(shape: Callable[[Tensor], Any]) -> None:
    runner = GraphRunner(shape)
    for _ in range(3):
        x = inputs(2, 4)
        assert agree(runner(x), shape(x))
    assert runner.info().replays == 3


def test_nested_inputs_and_keywords() -> None:
    def region(batch: dict[str, Any], *, boxes: Boxes) -> Tensor:
        return batch["a"][0] + batch["b"] * boxes.xy

    runner = GraphRunner(region)
    for _ in range(3):
        batch, boxes = {"a": [inputs(2), "x"], "b": inputs(2)}, Boxes(inputs(2))
        assert agree(runner(batch, boxes=boxes), region(batch, boxes=boxes))
    assert runner.info().captures == 1
    assert runner.info().replays == 3


# ---------------------------------------------------------------- results
def test_results_handed_out_stay_and_static_ones_do_not() -> None:
    model = net()
    a, b = inputs(2, 4), inputs(2, 4)
    runner = GraphRunner(model)
    held = runner(a)
    runner(b)
    assert agree(held, model(a))
    bare = GraphRunner(model, clone_outputs=False)
    held = bare(a)
    bare(b)
    assert agree(held, model(b))


def test_buffers_and_random_streams_move_as_eager_moves_them() -> None:
    def made() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to("cuda").train()

    graphed, plain = made(), made()
    runner = GraphRunner(graphed)
    calls = [inputs(3, 4) for _ in range(3)]
    torch.manual_seed(5)
    found = [runner(x) for x in calls]
    torch.manual_seed(5)
    assert agree(found, [plain(x) for x in calls])
    assert agree(list(graphed.buffers()), list(plain.buffers()))


# ---------------------------------------------------------------- eager, and why
def test_a_host_input_runs_eager_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    runner, x = GraphRunner(model), torch.randn(2, 4)
    for _ in range(3):
        assert agree(runner(x), model(x))
    assert runner.info().eager == {"no input is on a CUDA device": 3}
    assert [r.message for r in caplog.records] == ["cuda_graph: Linear runs eager: no input is on a CUDA device"]


def test_gradients_run_eager() -> None:
    model, x = net(), inputs(2, 4)
    runner = GraphRunner(model)
    with torch.enable_grad():
        assert runner(x).requires_grad
    assert runner.info().captures == 0
    for p in model.parameters():
        p.requires_grad_(False)
    with torch.enable_grad():
        assert not runner(x).requires_grad
        assert runner.info().captures == 1
        model.linear.weight.requires_grad_(True)
        assert runner(x).requires_grad


def test_a_runner_inside_anothers_region_is_part_of_it() -> None:
    model, x = net(), inputs(2, 4)
    inner = GraphRunner(model)
    outer = GraphRunner(lambda x: inner(x) + 1, model)
    for _ in range(2):
        assert agree(outer(x), model(x) + 1)
    assert inner.info().captures == 0
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    inner(x)
    with torch.cuda.graph(graph, stream=stream):
        inner(x)
    assert inner.info().eager == {"the current stream is being captured by somebody else": 1}


def test_a_region_may_ask_for_gradients_of_its_own() -> None:
    def forces(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad((x * x).sum(), x)[0]

    runner = GraphRunner(forces, gap=lambda tensors: "it was never tried")
    for _ in range(3):
        x = inputs(3).requires_grad_()
        assert agree(runner(x), forces(x))
    assert runner.info().replays == 3


def test_two_captures_of_one_shape_are_told_apart() -> None:
    runner, x = GraphRunner(net()), inputs(2, 4)
    runner(x)
    with torch.autocast("cuda", torch.bfloat16):
        runner(x)
        runner(x)
    assert runner.info().captured == {"[2, 4] float32": 1, "[2, 4] float32 (2)": 2}


def test_no_more_graphs_than_allowed_ahead_of_use() -> None:
    runner = GraphRunner(net(), max_graphs=1)
    runner.capture(inputs(1, 4))
    runner.capture(inputs(1, 4))
    with pytest.raises(CaptureRefused, match="more than 1 signatures"):
        runner.capture(inputs(2, 4))


def test_what_torch_func_maps_runs_eager() -> None:
    model, x = net(), inputs(3, 2, 4)
    runner = GraphRunner(model)
    runner(x[0])
    assert agree(torch.func.vmap(runner)(x), torch.func.vmap(model)(x))
    assert runner.info().eager.total() == 1


class Named(Tensor):
    note = ""


def _named(x: Tensor) -> Tensor:
    y = (x + 1).as_subclass(Named)
    y.note = "kept"
    return y


def _appends(x: Tensor, *lists: list[Tensor]) -> Tensor:
    lists[0].append(x * 2)
    return x + 1


def test_a_container_that_is_changed_is_not_captured() -> None:
    runner = GraphRunner(_appends)
    for _ in range(3):
        features: list[Tensor] = []
        x = inputs(3)
        assert agree(runner(x, features), x + 1)
        assert agree(features, [x * 2])
    assert [r.cause for r in runner.refusals()] == ["input-mutation"]

    def takes(x: Tensor, options: dict[str, float]) -> Tensor:
        return x * options.pop("by")  # fails when it is given the same container twice

    runner = GraphRunner(takes)
    assert agree(runner(x, {"by": 2.0}), x * 2)


def test_an_output_that_holds_more_than_values_is_not_captured() -> None:
    runner = GraphRunner(_named)
    for _ in range(3):
        result = runner(inputs(3))
        assert (type(result), result.note) == (Named, "kept")


def test_an_output_that_leads_back_to_a_weight_is_not_captured() -> None:
    weight = inputs(3).requires_grad_()
    runner = GraphRunner(lambda x: x * weight)  # whose weight no module tells of
    with torch.enable_grad():
        x, y = inputs(3), inputs(3)
        first, second = runner(x), runner(y)
        (first.sum() + second.sum()).backward()
    assert weight.grad is not None
    assert agree(weight.grad, x + y)


def test_features_that_a_hook_keeps_are_eagers() -> None:
    model, found = net(), dict[str, Tensor]()
    handle = model.linear.register_forward_hook(lambda _, __, out: found.update(out=out))
    runner = GraphRunner(model)
    for _ in range(3):
        x = inputs(2, 4)
        runner(x)
        assert agree(found["out"], torch.nn.functional.linear(x, model.linear.weight, model.linear.bias))
    assert [r.cause for r in runner.refusals()] == ["host-state"]
    handle.remove()
    model.linear.register_forward_hook(lambda _, __, out: out * 2)  # keeps nothing
    runner.release()
    runner(inputs(2, 4))
    assert runner.info().captures == 1


# ---------------------------------------------------------------- failures
class Flaky(nn.Module):
    """Fails while it is captured, as often as told; draws from the default generator and from one of its own."""

    def __init__(self, failures: int, error: type[BaseException] = RuntimeError) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.own = torch.Generator("cuda")
        self.failures, self.error = failures, error

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight + torch.rand(4, device="cuda") + torch.rand(4, device="cuda", generator=self.own)
        if torch.cuda.is_current_stream_capturing() and self.failures:
            self.failures -= 1
            raise self.error("told to fail")
        return y


def numbers(run: Callable[[Tensor], Tensor], model: Flaky) -> list[Tensor]:
    torch.manual_seed(7)
    model.own.manual_seed(8)
    return [run(torch.full((4,), float(i), device="cuda")) for i in range(5)]


def _of_all(model: Net, kind: str, hook: Callable[..., None]) -> Any:
    if kind == "global":
        return nn.modules.module.register_module_forward_hook(hook)
    if kind == "input":
        return model.linear.register_forward_pre_hook(lambda module, given: hook(module, (), given[0]))
    return model.register_forward_hook(hook)


@pytest.mark.parametrize("kind", ["input", "output", "global"])
def test_what_a_hook_keeps_of_inputs_and_outputs_is_eagers(kind: str) -> None:
    model, kept = net(), list[Tensor]()
    handle = _of_all(model, kind, lambda module, _, x: kept.append(x.detach()))
    try:
        runner = GraphRunner(model.__call__, model)
        for _ in range(3):
            kept.clear()
            x = inputs(2, 4)
            y = runner(x)
            assert agree(kept[-1:], [x if kind == "input" else y])
        assert [r.cause for r in runner.refusals()] == ["host-state"]
    finally:
        handle.remove()


def test_a_hook_beside_a_result_that_every_call_hands_out_is_no_keeper() -> None:
    model, table = net(), inputs(3)
    model.register_forward_hook(lambda *_: None)
    runner = GraphRunner(lambda x: (model(x), table), model)
    for _ in range(2):
        assert agree(runner(x := inputs(2, 4)), (model(x), table))
    assert runner.info().replays == 2


class Projects(nn.Module):
    """Builds what it multiplies with in its first call, under a seed of its own."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            with torch.random.fork_rng([0]):
                torch.manual_seed(3)
                self.table = torch.randn(4, 4, device=x.device)
        return x @ self.table


def test_a_seed_for_what_is_built_once_is_no_reset() -> None:
    model = Projects()
    runner = GraphRunner(model)
    for _ in range(2):
        assert agree(runner(x := inputs(2, 4)), model(x))
    assert (runner.refusals(), runner.info().replays) == ([], 2)


@dataclasses.dataclass
class Corners:
    xy: Tensor

    @functools.cached_property
    def areas(self) -> Tensor:
        return self.xy.prod(-1)


def test_what_an_argument_works_out_once_is_no_change_of_it() -> None:
    def region(given: Corners) -> Tensor:
        return given.areas + 1

    runner = GraphRunner(region)
    for _ in range(2):
        x = inputs(2, 4)
        assert agree(runner(Corners(x)), x.prod(-1) + 1)
    assert runner.info().replays == 2


def test_the_eager_result_lives_while_it_is_captured() -> None:
    """Else the allocator could give its addresses to the capture's results, which would look like tensors of the module's owner."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def region(x: Tensor) -> Tensor:
        alive.extend(ref() is not None for ref in made[-1:])
        made.append(weakref.ref(y := x + 1))
        return y

    GraphRunner(region, warmup=1).capture(inputs(2))
    assert alive[-1:] == [True]
    assert made[0]() is None


@pytest.mark.parametrize("failures", [0, 1])
def test_random_streams_after_a_capture_that_failed_or_did_not(failures: int) -> None:
    model, twin = Flaky(failures).to("cuda"), Flaky(0).to("cuda")
    runner = GraphRunner(model)
    assert agree(numbers(runner, model), numbers(twin, twin))
    assert not agree(torch.rand(3, device="cuda"), torch.rand(3, device="cuda"))  # the default generator still draws
    assert runner.info().captures == 1 - failures
    assert runner.info().eager.total() == 5 * failures


def test_a_failed_capture_names_its_reason_and_drops_graphs_that_followed_the_broken_stream() -> None:
    good, bad, x = Flaky(0).to("cuda"), Flaky(1).to("cuda"), inputs(4)
    first, second = GraphRunner(good), GraphRunner(bad)
    first(x)
    stream = torch.cuda.current_stream()
    second(x)
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    assert list(second.info().eager) == ["refused: unknown: RuntimeError: told to fail"]
    assert first.entries() == []
    assert sum(first.info().dropped.values()) == 1
    assert agree(numbers(first, good), numbers(good, good))
    second.release()
    second(x)
    assert second.info().captures == 1


def test_an_interrupt_during_a_capture_passes_and_leaves_the_streams_whole() -> None:
    model = Flaky(1, KeyboardInterrupt).to("cuda")
    runner, stream = GraphRunner(model), torch.cuda.current_stream()
    with pytest.raises(KeyboardInterrupt):
        runner(inputs(4))
    assert torch.cuda.current_stream() == stream
    assert agree(numbers(runner, model), numbers(model, model))


def test_an_interrupt_drops_graphs_that_followed_the_broken_stream() -> None:
    good = Flaky(0).to("cuda")
    runner = GraphRunner(good)
    runner(inputs(4))
    with pytest.raises(KeyboardInterrupt):
        GraphRunner(Flaky(1, KeyboardInterrupt).to("cuda"))(inputs(4))
    assert agree(numbers(runner, good), numbers(good, good))


def test_what_the_region_raises_in_eager_is_raised() -> None:
    runner = GraphRunner(net())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        runner(inputs(2, 5))
    x = inputs(2, 4)
    assert agree(runner(x), runner(x))


def test_refused_once_and_eager_from_then_on() -> None:
    def region(x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 0 else x

    runner, x = GraphRunner(region), torch.ones(3, device="cuda")
    with pytest.raises(CaptureRefused, match="host-sync") as caught:
        runner.capture(x)
    assert caught.value.cause == "host-sync"
    for y in (x, -x, x):
        assert agree(runner(y), region(y))


def test_a_refusal_that_is_kept_holds_nothing_that_was_captured() -> None:
    runner = GraphRunner(Counts().to("cuda"), gap=lambda tensors: "it was never tried")
    runner(torch.ones(3, device="cuda"))
    (refusal,) = runner.refusals()
    assert refusal.__traceback__ is None


def test_what_was_looked_up_before_a_release_is_not_used_after_it() -> None:
    """Another thread may release between a look-up and the note of it."""
    runner, x = GraphRunner(lambda x: x + 1), torch.ones(3, device="cuda")
    runner(x)
    stale, epoch = (lambda x: pytest.fail("a shortcut of before was taken")), runner._epoch
    runner.release()
    runner._shortcut = stale, epoch
    assert agree(runner(x), x + 1)


# ---------------------------------------------------------------- first use
class Counts(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_first_use_without_a_certificate_must_replay_eager_bit_for_bit() -> None:
    model = Counts().to("cuda")
    trusting, careful = GraphRunner(model), GraphRunner(model, gap=lambda tensors: "controls/counts was never tried")
    x = inputs(3)
    trusting(x)
    assert trusting.info().captures == 1  # nothing asked it to validate
    careful(x)
    (reason,) = careful.info().eager
    assert "was never tried, and its first use did not validate: output leaf 0 differs from eager on this input" in reason
    good = GraphRunner(net(), gap=lambda tensors: "never tried")
    x = inputs(2, 4)
    assert agree(good(x), good.region(x))
    assert good.info().captures == 1
    assert good.info().replays == 1


def test_validation_looks_at_another_input_too() -> None:
    def region(x: Tensor) -> Tensor:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            high = bool(x[0] > 0.999)  # read behind the device's back: frozen, and right for the first input
        return x * 2 if high else x * 3

    runner, x = GraphRunner(region, gap=lambda tensors: "never tried"), torch.linspace(1, 0, 64, device="cuda")
    assert agree(runner(x), x * 2)
    (reason,) = runner.info().eager
    assert "differs from eager on a second probe" in reason


def test_the_second_probe_is_legal_and_different() -> None:
    floats, constant, indices = torch.linspace(-1, 3, 50), torch.zeros(8), torch.arange(6)
    a, b, c, word = second_probe([floats, constant, indices, "word"])
    assert not torch.equal(a, floats)
    assert a.min() >= -1
    assert a.max() <= 3
    assert b.abs().sum() > 0
    assert c.tolist() == [5, 4, 3, 2, 1, 0]
    assert word == "word"


# ---------------------------------------------------------------- imports
def test_importing_the_runtime_is_lazy_and_an_allowlist_needs_no_torch() -> None:
    code = (
        "import sys, parity.runtime.allowlist\n"
        "assert 'torch' not in sys.modules\n"
        "from parity.runtime import Allowlist, AllowlistError, CaptureRefused, NotCertified\n"
        "assert 'torch' not in sys.modules\n"
        "from parity.runtime import GraphRunner, Seam, CudaGraphModel\n"
        "assert not {'pytest', 'pandas', 'hypothesis', 'families', 'parity.judge', 'parity.rows'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_output_on_the_host_is_refused_by_name() -> None:
    """Made anew by every eager call, once by a capture: also where other outputs are on the device."""
    calls: list[int] = []

    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return x * 2, torch.full((2,), float(len(calls)))

    runner = GraphRunner(region)
    with pytest.raises(CaptureRefused, match="an output is a host tensor") as refused:
        runner.capture(inputs(3))
    assert refused.value.cause == "host-state"
    _, counted = runner(inputs(3))
    assert counted.tolist() == [float(len(calls))] * 2


# ---------------------------------------------------------------- what eager can and a capture must not spoil
def test_weights_without_a_shape_wait_for_an_eager_call() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU()).to("cuda").eval()
    runner = GraphRunner(model)
    runner(inputs(2, 4))
    for _ in range(2):
        x = inputs(2, 4)
        assert agree(runner(x), model(x))
    assert (runner.info().captures, runner.info().replays) == (1, 2)
    assert runner.info().eager == {"a parameter has no shape before the first call": 1}


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(4, generator=self.generator).to(x.device)


def test_a_refused_capture_draws_nothing_from_a_modules_host_generator() -> None:
    runner, eager, x = GraphRunner(Drawing()), Drawing(), inputs(2, 4)
    for _ in range(3):
        assert agree(runner(x), eager(x))
    assert [r.cause for r in runner.refusals()] == ["h2d-copy"]


def test_sizes_and_torchs_own_kinds_of_results_go_in_and_come_out() -> None:
    def region(x: Tensor, size: torch.Size) -> Any:
        return x.max(dim=0), x * size.numel(), x.shape

    runner, size = GraphRunner(region), torch.Size([2, 3])
    for _ in range(2):
        x = inputs(2, 4)
        largest, scaled, shape = runner(x, size)
        assert type(shape) is torch.Size
        assert isinstance(largest, torch.return_types.max)
        assert agree((largest, scaled), (x.max(dim=0), x * 6))
    assert runner.info().replays == 2
