"""Each substitute against the op itself, in float64. This is the one place where a tolerance is right: a deterministic order of
additions is another order, so the last bits must differ. Whether two arms agree is judged by bits, as everywhere else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import grid_sample as imported_by_name
from torch.utils.checkpoint import checkpoint

from parity.judge.counterfactual import sampling, substitutes
from parity.judge.counterfactual.substitutes import SUBSTITUTES, Substitute, substituted
from parity.runtime.emulated import device
from parity.runtime.state import same_bits

NAMES = [s.name for s in SUBSTITUTES]
Op = Callable[..., Tensor]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def outputs(op: Op, leaves: list[Tensor], names: list[str], weight: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """The output and the gradients of a weighted sum of it, with some substitutes in place."""
    with substituted(names):
        made = op(*leaves)
        weight = torch.randn(made.shape, dtype=made.dtype, generator=torch.Generator().manual_seed(1)) if weight is None else weight
        return made.detach(), list(torch.autograd.grad(made, leaves, weight))


def close(mine: Tensor, theirs: Tensor) -> bool:
    return mine.shape == theirs.shape and mine.dtype == theirs.dtype and torch.allclose(mine, theirs, rtol=1e-9, atol=1e-10)


def agrees(op: Op, *leaves: Tensor, name: str, forward_bits: bool = True) -> None:
    theirs, their_grads = outputs(op, list(leaves), [])
    mine, grads = outputs(op, list(leaves), [name])
    assert same_bits(mine, theirs) if forward_bits else close(mine, theirs)
    assert all(close(a, b) for a, b in zip(grads, their_grads, strict=True))
    assert all(same_bits(a, b) for a, b in zip(grads, outputs(op, list(leaves), [name])[1], strict=True))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


sizes = st.integers(1, 5)


@given(
    st.lists(sizes, min_size=2, max_size=3),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.sampled_from(["bilinear", "nearest", "bicubic"]),
    st.sampled_from(["zeros", "border", "reflection"]),
    st.booleans(),
    st.integers(0, 99),
)
@example([1, 1], [2, 2, 2], "bilinear", "reflection", True, 0)
@example([1, 5], [2, 2, 2], "bicubic", "reflection", True, 0)
def test_grid_sample(size: list[int], out: list[int], mode: str, padding: str, aligned: bool, seed: int) -> None:
    assume(len(size) == 2 or mode != "bicubic")
    pixels = drawn(2, 3, *size, seed=seed)
    grid = drawn(2, *out[: len(size)], len(size), seed=seed + 100)
    agrees(lambda p, g: F.grid_sample(p, g, mode, padding, aligned), pixels, grid, name="grid_sample")


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("aligned", [False, True])
def test_points_on_the_edges_between_pixels_fall_to_the_side_of_the_op(mode: str, padding: str, aligned: bool) -> None:
    """There the slope jumps, so that another rounding of a coordinate is another gradient."""
    axis = torch.linspace(-1.5, 1.5, 25, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)[None].requires_grad_()
    agrees(lambda p, g: F.grid_sample(p, g, mode, padding, aligned), drawn(1, 2, 4, 6), grid, name="grid_sample")


def test_cudnn_samples_as_the_aligned_bilinear_op_does() -> None:
    pixels, grid = drawn(2, 3, 4, 5), drawn(2, 3, 2, 2, seed=1)
    made = F.grid_sample(pixels, grid, align_corners=True)
    weight = torch.randn_like(made)
    mine = sampling.cudnn_backward(pixels.detach(), grid.detach(), weight)
    theirs = torch.autograd.grad(made, (pixels, grid), weight)
    assert all(a is not None and close(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("index", [0, 1])
def test_a_gradient_that_nobody_wants_is_none(index: int) -> None:
    leaves = [drawn(1, 2, 3, 3), drawn(1, 2, 2, 2, seed=1)]
    wanted = [i == index for i in range(2)]
    made = sampling.backward(torch.ones(1, 2, 2, 2, dtype=torch.float64), *(t.detach() for t in leaves), 0, 0, False, wanted)
    assert [g is not None for g in made] == wanted
    leaves[1 - index].requires_grad_(False)
    op = lambda one: F.grid_sample(*(one if i == index else leaves[i] for i in range(2)), align_corners=False)  # noqa: E731
    agrees(op, leaves[index], name="grid_sample")


def test_an_infinite_gradient_stays_where_it_is() -> None:
    """An overflow of half precision under a GradScaler must not spread to pixels that the point does not touch."""
    grid = torch.tensor([[[[-3.0, -3.0], [0.0, 0.0]]]], dtype=torch.float64)
    weight = torch.tensor([float("inf"), 1.0], dtype=torch.float64).view(1, 1, 1, 2)
    op = lambda p: F.grid_sample(p, grid, align_corners=False)  # noqa: E731
    pixels = drawn(1, 1, 4, 4)
    _, theirs = outputs(op, [pixels], [], weight)
    _, mine = outputs(op, [pixels], ["grid_sample"], weight)
    assert bool(theirs[0].isfinite().all())
    assert same_bits(mine[0], theirs[0])


LINEAR = {3: ["linear"], 4: ["bilinear", "bicubic"], 5: ["trilinear"]}


@given(st.lists(sizes, min_size=1, max_size=3), st.data())
def test_interpolate(size: list[int], data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(LINEAR[len(size) + 2]))
    aligned = data.draw(st.booleans())
    antialias = len(size) == 2 and data.draw(st.booleans())
    options: dict[str, Any]
    if data.draw(st.booleans()):
        options = {"size": data.draw(st.lists(st.integers(1, 7), min_size=len(size), max_size=len(size)))}
    else:
        factors = data.draw(st.lists(st.floats(1.0, 2.6), min_size=len(size), max_size=len(size)))
        options = {"scale_factor": factors, "recompute_scale_factor": data.draw(st.booleans())}
    image = drawn(2, 3, *size)
    made = F.interpolate(image.detach(), mode=mode, align_corners=aligned, antialias=antialias, **options)
    if antialias:  # on a CPU torch's kernel is wrong for columns of one pixel, and its backward where a scale leaves a length as it was
        assume(made.shape[-1] > 1 and size[-1] > 1)
        assume("size" in options or all(a != b for a, b in zip(size, made.shape[2:], strict=True)))
    agrees(lambda x: F.interpolate(x, mode=mode, align_corners=aligned, antialias=antialias, **options), image, name="interpolate")


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("factors", [[1.25, 1.25], [1.25, 2.0], [2.0, 1.25]])
def test_a_scale_that_leaves_a_length_is_used_where_the_op_uses_it(mode: str, factors: list[float]) -> None:
    agrees(lambda x: F.interpolate(x, scale_factor=factors, mode=mode), drawn(1, 2, 3, 3), name="interpolate")


def test_a_resize_is_the_transpose_of_its_own_forward_even_where_the_op_is_not() -> None:
    """On a CPU the antialiased backward takes no account of a scale that leaves a length as it was; the forward does."""

    def op(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=[1.25, 1.25], mode="bilinear", antialias=True)

    forward = op(torch.eye(6, dtype=torch.float64).view(6, 1, 2, 3)).view(6, 6)
    image = drawn(1, 1, 2, 3)
    rows = [outputs(op, [image], ["interpolate"], unit.view(1, 1, 2, 3))[1][0].view(6) for unit in torch.eye(6, dtype=torch.float64)]
    assert close(torch.stack(rows, 1), forward)


@given(st.lists(sizes, min_size=2, max_size=3), st.lists(st.integers(2, 6), min_size=3, max_size=3), st.booleans())
def test_adaptive_average_pools(size: list[int], out: list[int], batched: bool) -> None:
    pool = {2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[len(size)]
    leading = (2, 3) if batched else (3,)
    agrees(lambda x: pool(x, out[: len(size)]), drawn(*leading, *size), name="adaptive_avg_pool")


@given(st.lists(sizes, min_size=2, max_size=2), st.lists(sizes, min_size=2, max_size=2), st.booleans())
def test_adaptive_maximum_pools(size: list[int], out: list[int], batched: bool) -> None:
    leading = (2, 3) if batched else (3,)
    agrees(lambda x: F.adaptive_max_pool2d(x, out), drawn(*leading, *size), name="max_pool")


@pytest.mark.parametrize("dims", [2, 3])
def test_fractional_maximum_pools(dims: int) -> None:
    pool = {2: F.fractional_max_pool2d, 3: F.fractional_max_pool3d}[dims]
    samples = torch.rand(2, 3, dims, dtype=torch.float64)
    agrees(lambda x: pool(x, 2, output_size=3, _random_samples=samples), drawn(2, 3, *[5] * dims), name="max_pool")


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=3))
def test_reflection_padding(axes: list[tuple[int, int, int]]) -> None:
    size = [n for n, _, _ in axes]
    padding = [min(p, n - 1) for n, left, right in reversed(axes) for p in (left, right)]
    agrees(lambda x: F.pad(x, padding, mode="reflect"), drawn(2, 3, *size), name="reflection_pad")


def test_reflection_that_cuts_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"by \(-1, 0\): a negative width"):
        substitutes._unreflect(torch.ones(1, 1, 3), torch.ones(1, 1, 4), [-1, 0])


@given(
    st.sampled_from(["mean", "sum", "none"]),
    st.booleans(),
    st.sampled_from([-100, 1]),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 20),
)
def test_cross_entropy_of_pixels(reduction: str, weighted: bool, ignored: int, smoothing: float, seed: int) -> None:
    scores = drawn(2, 4, 3, 5, seed=seed)
    classes = torch.randint(0, 4, (2, 3, 5), generator=torch.Generator().manual_seed(seed))
    weight = torch.tensor([0.5, 1.0, 2.0, 0.0], dtype=torch.float64) if weighted else None

    def op(x: Tensor) -> Tensor:
        return F.cross_entropy(x, classes, weight, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing)

    agrees(op, scores, name="nll_loss", forward_bits=False)


def test_pixels_that_are_all_ignored_give_what_the_op_gives() -> None:
    scores, classes = drawn(1, 3, 2, 2), torch.full((1, 2, 2), 255)
    for reduction in ("mean", "sum"):
        made = [outputs(lambda x, r=reduction: F.cross_entropy(x, classes, ignore_index=255, reduction=r), [scores], n)
                for n in ([], ["nll_loss"])]  # fmt: skip
        assert made[0][0].isnan() == made[1][0].isnan() == (reduction == "mean")


# ---- dtypes, autocast, layouts


PAIRS: list[tuple[str, Op]] = [
    ("grid_sample", lambda x: F.grid_sample(x, torch.linspace(-1.1, 1.1, 36).view(2, 3, 3, 2).to(x.dtype), align_corners=False)),
    ("interpolate", lambda x: F.interpolate(x, (7, 5), mode="bicubic")),
    ("adaptive_avg_pool", lambda x: F.adaptive_avg_pool2d(x, (2, 3))),
    ("max_pool", lambda x: F.adaptive_max_pool2d(x, (2, 3))),
    ("reflection_pad", lambda x: F.pad(x, (1, 2, 3, 0), mode="reflect")),
    ("nll_loss", lambda x: F.nll_loss(x.contiguous(), torch.ones(2, 4, 6, dtype=torch.int64))),
]


@pytest.mark.parametrize(("name", "op"), PAIRS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_has_the_dtype_of_the_op_whatever_the_layout(name: str, op: Op, dtype: torch.dtype) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = drawn(2, 3, 4, 6).detach().to(dtype).contiguous(memory_format=layout).requires_grad_()
        (theirs, [grad]), (mine, [other]) = outputs(op, [x], []), outputs(op, [x], [name])
        assert (mine.dtype, other.dtype, other.shape) == (theirs.dtype, grad.dtype, grad.shape)
        if dtype == torch.float32:  # a CPU computes even coordinates in half precision
            assert torch.allclose(other, grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["interpolate", "adaptive_avg_pool", "max_pool", "reflection_pad"])
def test_half_precision_is_rounded_once(name: str) -> None:
    op, low = dict(PAIRS)[name], drawn(2, 3, 4, 6).detach().bfloat16()
    weight = torch.randn(op(low.float()).shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    _, [exact] = outputs(op, [low.float().requires_grad_()], [name], weight.float())
    _, [mine] = outputs(op, [low.requires_grad_()], [name], weight)
    assert same_bits(mine, exact.bfloat16())


@pytest.mark.parametrize(("name", "op"), PAIRS, ids=NAMES)
def test_autocast_gives_the_dtypes_that_it_gives_the_op(name: str, op: Op) -> None:
    x = drawn(2, 3, 4, 6).detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (theirs, [grad]), (mine, [other]) = outputs(op, [x], []), outputs(op, [x], [name])
    assert (mine.dtype, other.dtype) == (theirs.dtype, grad.dtype)


@pytest.mark.parametrize(("name", "op"), PAIRS, ids=NAMES)
def test_a_backward_within_autocast_has_the_bits_of_one_outside(name: str, op: Op) -> None:
    x = drawn(2, 3, 4, 6).detach().float().requires_grad_()
    weight = torch.randn(op(x).shape, generator=torch.Generator().manual_seed(1))
    _, [outside] = outputs(op, [x], [name], weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, [inside] = outputs(op, [x], [name], weight)
    assert same_bits(inside, outside)


# ---- who is reached, and what is left behind


def counting(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """The ATen ops whose substitutes are called, from now on."""
    called: list[str] = []
    real = substitutes._BY_NAME[name]

    def wrapped(op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            called.append(op)
            return kernel(*args)

        return counted

    fake = dataclasses.replace(real, kernels={op: wrapped(op, kernel) for op, kernel in real.kernels.items()})
    monkeypatch.setitem(substitutes._BY_NAME, name, fake)
    return called


class ByModule(nn.Module):
    def forward(self, pixels: Tensor, grid: Tensor) -> Tensor:
        return checkpoint(lambda p, g: imported_by_name(p, g, align_corners=False).sin(), pixels, grid, use_reentrant=False)


CALLERS: dict[str, Op] = {
    "torch.nn.functional": lambda p, g: F.grid_sample(p, g, align_corners=False),
    "imported by name": lambda p, g: imported_by_name(p, g, align_corners=False),
    "torch.grid_sampler": lambda p, g: torch.grid_sampler(p, g, 0, 0, False),
    "torch.ops": lambda p, g: torch.ops.aten.grid_sampler_2d(p, g, 0, 0, False),
    "a checkpoint recomputed inside the backward": ByModule(),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_every_caller_is_reached(caller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = counting(monkeypatch, "grid_sample")
    outputs(CALLERS[caller], [drawn(1, 2, 3, 3), drawn(1, 2, 2, 2, seed=1)], ["grid_sample"])
    assert called == ["grid_sampler_2d_backward"]


def test_what_a_composite_calls_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    called = counting(monkeypatch, "adaptive_avg_pool")
    outputs(lambda x: F.interpolate(x, (2, 3), mode="area"), [drawn(1, 2, 4, 6)], ["adaptive_avg_pool"])
    assert called == ["_adaptive_avg_pool2d_backward"]
    called = counting(monkeypatch, "interpolate")
    outputs(nn.Upsample(scale_factor=2, mode="bilinear"), [drawn(1, 2, 4, 6)], ["interpolate"])
    assert called == ["upsample_bilinear2d_backward"]


def test_outside_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    called = counting(monkeypatch, "grid_sample")
    op, leaves = CALLERS["torch.nn.functional"], [drawn(1, 2, 3, 3), drawn(1, 2, 2, 2, seed=1)]
    before = outputs(op, leaves, [])[1]
    with substituted(["grid_sample"]), substituted(["grid_sample", "interpolate"]):
        outputs(op, leaves, [])
    with pytest.raises(KeyError), substituted(["grid_sample"]):
        raise KeyError
    assert len(called) == 1
    after = outputs(op, leaves, [])[1]
    assert len(called) == 1
    assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))


def test_leaving_the_inner_of_two_leaves_the_outer(monkeypatch: pytest.MonkeyPatch) -> None:
    called = counting(monkeypatch, "grid_sample")
    with substituted(["grid_sample"]):
        with substituted(["grid_sample"]):
            pass
        outputs(CALLERS["torch.nn.functional"], [drawn(1, 2, 3, 3), drawn(1, 2, 2, 2, seed=1)], [])
    assert called == ["grid_sampler_2d_backward"]


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="no substitute is called conv: grid_sample, interpolate, "), substituted(["conv"]):
        pass


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_substitute_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = substitutes._BY_NAME[name]

    def halved(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any) -> Any:
            made = kernel(*args)
            return tuple(t if t is None else t / 2 for t in made) if isinstance(made, tuple) else made / 2

        return wrong

    fake: Substitute = dataclasses.replace(real, kernels={op: halved(kernel) for op, kernel in real.kernels.items()})
    monkeypatch.setitem(substitutes._BY_NAME, name, fake)
    with pytest.raises(AssertionError):
        agrees(dict(PAIRS)[name], drawn(2, 3, 4, 6), name=name, forward_bits=name != "nll_loss")


# ---- captured


def arguments() -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Every kernel with what the dispatcher gives it."""
    by_op = {op: kernel for s in SUBSTITUTES for op, kernel in s.kernels.items()}
    x, grid = torch.randn(2, 3, 4, 6), torch.rand(2, 3, 3, 2)
    indices = torch.zeros(2, 3, 2, 2, dtype=torch.int64)
    calls: dict[str, tuple[Any, ...]] = {
        "grid_sampler_2d_backward": (torch.randn(2, 3, 3, 3), x, grid, 2, 2, False, [True, True]),
        "upsample_bicubic2d_backward": (torch.randn(2, 3, 8, 9), [8, 9], [2, 3, 4, 6], False),
        "_upsample_bilinear2d_aa_backward": (torch.randn(2, 3, 3, 3), [3, 3], [2, 3, 4, 6], False, 0.8, 0.5),
        "_adaptive_avg_pool2d_backward": (torch.randn(2, 3, 2, 2), x),
        "adaptive_max_pool2d_backward": (torch.randn(2, 3, 2, 2), x, indices),
        "reflection_pad2d_backward": (torch.randn(2, 3, 6, 8), x, [1, 1, 2, 0]),
        "nll_loss2d_forward": (x, torch.ones(2, 4, 6, dtype=torch.int64), torch.rand(3), 1, -100),
    }
    assert {s.name for s in SUBSTITUTES for op in calls if op in s.kernels} == set(NAMES)
    for op, args in calls.items():
        yield by_op[op], args


def test_substitutes_can_be_captured_and_replayed() -> None:
    """On the emulated device, whose rules refuse a synchronisation, a copy from the host and a shape that depends on data."""
    for kernel, args in arguments():
        with device():
            args = tuple(a.cuda() if isinstance(a, Tensor) else a for a in args)
            expected = kernel(*args)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made = kernel(*args)
            graph.replay()
            pairs = zip(made, expected, strict=True) if isinstance(made, tuple) else [(made, expected)]
            assert all(same_bits(a.cpu(), b.cpu()) for a, b in pairs)


def test_no_shape_depends_on_data() -> None:
    """Meta tensors have none."""
    for kernel, args in arguments():
        made = kernel(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
        shapes = [t.shape for t in (made if isinstance(made, tuple) else (made,))]
        real = kernel(*args)
        assert shapes == [t.shape for t in (real if isinstance(real, tuple) else (real,))]


MORE: list[tuple[str, Op]] = [
    *PAIRS,
    ("grid_sample", lambda x: F.grid_sample(x, torch.linspace(-1.1, 1.1, 36, dtype=x.dtype).view(2, 3, 3, 2), align_corners=True)),
    ("interpolate", lambda x: F.interpolate(x, (3, 3), mode="bicubic", antialias=True)),
    ("interpolate", lambda x: F.interpolate(x, (9, 5), mode="bilinear", antialias=True)),
    ("interpolate", lambda x: F.interpolate(x, (9, 5), mode="bilinear", align_corners=True)),
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "op"), MORE)
def test_a_device_gives_what_its_op_gives(name: str, op: Op) -> None:
    x = drawn(2, 3, 4, 6).detach().cuda().requires_grad_()
    with torch.device("cuda"):
        made = op(x)
        weight = torch.randn_like(made)
        theirs = torch.autograd.grad(made, x, weight, retain_graph=True)[0]
        with substituted([name]):
            assert close(op(x).detach(), made.detach())
            assert close(torch.autograd.grad(made, x, weight)[0], theirs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "op"), PAIRS, ids=NAMES)
def test_a_device_repeats_itself_eagerly_and_replayed(name: str, op: Op) -> None:
    """Large enough for additions to collide."""
    x = (
        torch.randn(2, 3, 4, 6, device="cuda").repeat_interleave(64, 1)
        if name != "nll_loss"
        else torch.randn(2, 3, 4, 6, device="cuda")
    )
    x.requires_grad_()
    with torch.device("cuda"), substituted([name]):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            runs = [torch.autograd.grad(op(x).square().sum(), x)[0] for _ in range(5)]
            graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = torch.autograd.grad(op(x).square().sum(), x)[0]
        graph.replay()
        torch.cuda.synchronize()
    assert all(same_bits(run, captured) for run in runs)
