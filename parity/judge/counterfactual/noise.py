"""Which ops of a step may give other bits the next time, and where: by a table, since on a CPU torch does not tell.

The table follows the documentation of ``torch.use_deterministic_algorithms``, alerts in ATen's CUDA sources, and cuDNN's manual on
weight gradients. Ops are seen below autograd, decomposed, so it does not matter by which name a model calls them. The step that is
looked at here is never compared with another one: a dispatch mode changes bits.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parity.judge.counterfactual.conditions import applied
from parity.runtime.source import user_line

CUDNN: Final = ("cudnn-deterministic", "deterministic-algorithms")
ALGORITHMS: Final = ("deterministic-algorithms",)


@dataclass(frozen=True)
class NoisyOp:
    """``op``: its public name. ``module``: qualified name of the innermost submodule, empty outside of the network. ``where``: line of
    the model. ``remedies``: names of conditions each of which makes it repeatable; empty where none is known."""

    op: str
    module: str
    where: str
    remedies: tuple[str, ...]


@dataclass(frozen=True)
class _Entry:
    op: str
    phase: str
    remedies: tuple[str, ...]


def _entries() -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}

    def say(op: str, phase: str, remedies: tuple[str, ...], *names: str) -> None:
        for name in names or (op,):
            found[name if "::" in name else "aten::" + name] = _Entry(op, phase, remedies)

    sampled, resized = ("substitute:grid_sample",), ("substitute:interpolate",)
    say("grid_sample", "backward", sampled, "grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler")
    say("interpolate", "backward", (*ALGORITHMS, *resized), "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
    say(
        "interpolate",
        "backward",
        resized,
        *("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
    )
    say("adaptive_avg_pool", "backward", ("substitute:adaptive_avg_pool",), "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
    say("adaptive_max_pool", "backward", ("substitute:max_pool",), "adaptive_max_pool2d")
    say("fractional_max_pool", "backward", ("substitute:max_pool",), "fractional_max_pool2d", "fractional_max_pool3d")
    say("reflection_pad", "backward", ("substitute:reflection_pad",), *(f"reflection_pad{n}d" for n in (1, 2, 3)))
    say("nll_loss", "forward", ("substitute:nll_loss",), "nll_loss2d_forward")
    say("convolution", "backward", CUDNN)
    attention = "_scaled_dot_product_"
    say("scaled_dot_product_attention", "backward", ("math-sdpa",), attention + "efficient_attention", attention + "cudnn_attention")
    say(
        "scaled_dot_product_attention",
        "backward",
        (*ALGORITHMS, "math-sdpa"),
        *(attention + "flash_attention", attention + "flash_attention_for_cpu", attention + "fused_attention_overrideable"),
    )
    say("replication_pad", "backward", ALGORITHMS, *(f"replication_pad{n}d" for n in (1, 2, 3)))
    say("max_pool3d", "backward", ALGORITHMS, "max_pool3d_with_indices")
    for op in ("embedding", "gather", "index_select"):
        say(op, "backward", ALGORITHMS)
    for op in ("scatter_add", "index_add", "scatter_reduce", "index_copy", "index_put"):
        say(op, "forward", ALGORITHMS, op, op + "_")
    say("cumsum", "forward", ALGORITHMS)
    say("embedding_bag", "backward", (), "_embedding_bag")
    for op in ("avg_pool3d", "_ctc_loss", "torchvision::roi_align", "torchvision::roi_pool", "torchvision::ps_roi_align"):
        say(op.split("::")[-1].strip("_"), "backward", (), op)
    say("deform_conv2d", "backward", (), "torchvision::deform_conv2d")
    for op in ("max_unpool2d", "max_unpool3d", "histc", "put_"):
        say(op.strip("_"), "forward", ())
    return found


_TABLE: Final = _entries()
REMEDIES: Final = frozenset(remedy for entry in _TABLE.values() for remedy in entry.remedies)


def _harmless(name: str, args: tuple[Any, ...]) -> bool:
    """Calls of a listed op that use none of its atomic additions."""
    if name.startswith("aten::index_put"):  # CUDA sorts where it accumulates; a mask, or one value, gives the same in any order
        masked = all(index is None or index.dtype == torch.bool for index in args[1])
        return masked or (len(args) > 3 and bool(args[3])) or args[2].numel() == 1
    if name == "aten::nll_loss2d_forward":
        return int(args[3]) == 0
    return False


class _Watch(TorchDispatchMode):
    def __init__(self, path: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.path = path
        self.found: dict[NoisyOp, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        entry = _TABLE.get(name)
        if entry is not None:
            tensors = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor) and t.is_floating_point()]
            differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
            if (differentiated if entry.phase == "backward" else bool(tensors)) and not _harmless(name, args):
                module = self.path[-1] if self.path else ""
                self.found.setdefault(NoisyOp(entry.op, module, user_line(), entry.remedies))
        return func(*args, **(kwargs or {}))


def noisy_ops(run: Callable[[], Any], network: nn.Module) -> list[NoisyOp]:
    """The noisy ops of one step, in the order in which they first ran: those that ran forward, or whose backward will run.

    ``run`` takes the step; what it changes is its own to undo. Ops outside of ``network`` have no module.
    """
    names = {module: name for name, module in network.named_modules()}
    path: list[str] = []
    depths: list[tuple[nn.Module, int]] = []

    def enter(module: nn.Module, args: Any) -> None:
        if module in names:
            depths.append((module, len(path)))
            path.append(names[module])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if depths and depths[-1][0] is module:
            del path[depths.pop()[1] :]

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    watch = _Watch(path)
    try:
        with watch:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return list(watch.found)


_ALERT: Final = re.compile(r"(\S+) (?:does not have a deterministic|defaults to a non-deterministic)")


def alerts(run: Callable[[], Any]) -> tuple[str, ...]:
    """What torch itself says of a step under deterministic algorithms: the kernels it has no deterministic version of, in order. They
    have names of their own (``grid_sampler_2d_backward_cuda``), and no place. Silent on a CPU."""
    with applied(["deterministic-algorithms"]), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run()
    found = (_ALERT.search(str(w.message)) for w in told)
    return tuple(dict.fromkeys(m.group(1) for m in found if m))
