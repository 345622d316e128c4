"""One run of a network, forward and backward, on leaves of its own: aliases of parameters and inputs on the same memory."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parity.runtime import tree
from parity.runtime.engine import on_device
from parity.runtime.errors import CaptureRefused
from parity.runtime.gradients import ODD, Layout

_READ: Final = inspect.getattr_static(Tensor, "grad").__get__
_REENTRANT: Final = "CheckpointFunctionBackward"


@dataclass
class Outputs:
    """Where each leaf of a result comes from: ``plan`` holds, per leaf, ("input", position), ("tensor", place among ``tensors``) or
    ("fixed", value). ``tensors``: what has to be computed, one object once."""

    spec: Any
    plan: list[tuple[str, Any]]
    tensors: list[Tensor]

    @classmethod
    def of(cls, result: Any, inputs: list[Any]) -> Outputs:
        leaves, spec = tree.flatten(result)
        given = {id(x): i for i, x in reversed(list(enumerate(inputs))) if isinstance(x, Tensor)}
        places: dict[int, int] = {}
        plan: list[tuple[str, Any]] = []
        tensors: list[Tensor] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                plan.append(("fixed", leaf))
            elif id(leaf) in given:
                plan.append(("input", given[id(leaf)]))
            else:
                if id(leaf) not in places:
                    places[id(leaf)] = len(tensors)
                    tensors.append(leaf)
                plan.append(("tensor", places[id(leaf)]))
        return cls(spec, plan, tensors)

    def build(self, tensors: Any, inputs: list[Any]) -> Any:
        sources = {"input": inputs, "tensor": tensors}
        return tree.unflatten([x if kind == "fixed" else sources[kind][x] for kind, x in self.plan], self.spec)

    def differentiable(self) -> list[int]:
        return [i for i, t in enumerate(self.tensors) if t.requires_grad]


class GradientsRead(TorchFunctionMode):
    """Raises CaptureRefused where a forward reads the gradient of a parameter: the leaves of a capture have none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _READ and isinstance(args[0], nn.Parameter):
            raise CaptureRefused("host-state", "the network reads the gradient of a parameter, which a step leaves anew each time")
        return func(*args, **(kwargs or {}))


@dataclass
class Aliases:
    """``params``: fresh leaves, for those that require gradients, in order. ``buffers``: each buffer and what stands for it."""

    params: list[nn.Parameter]
    buffers: list[tuple[Tensor, Tensor]]


@contextlib.contextmanager
def aliased(module: nn.Module, *, copies: bool, trained: Sequence[nn.Parameter] | None = None) -> Iterator[Aliases]:
    """Within it the module holds fresh leaves on the memory of its parameters, and stand-ins for its buffers: copies, or aliases with
    version counters of their own. So nothing that autograd saved of the real ones before is touched. ``trained``: the parameters that
    require gradients, where those that do by now are not meant."""
    stand: dict[int, Any] = {}
    params: list[nn.Parameter] = []
    wanted = None if trained is None else set(map(id, trained))
    for p in module.parameters():
        if wanted is not None and id(p) not in wanted:
            stand[id(p)] = nn.Parameter(p.data, requires_grad=False) if p.requires_grad else p
        elif wanted is not None or p.requires_grad:
            if type(p) is not nn.Parameter or p.layout is not torch.strided:
                raise CaptureRefused(
                    "unknown", f"a parameter is a {type(p).__name__} of layout {p.layout}: only plain strided ones are captured"
                )
            stand[id(p)] = nn.Parameter(p.data)
            stand[id(p)].__dict__.update(p.__dict__)
            params.append(stand[id(p)])
    buffers = [(b, b.detach().clone() if copies else b.data) for b in module.buffers() if b.layout is torch.strided]
    stand.update((id(b), alias) for b, alias in buffers)
    undo: list[tuple[Any, Any, Any]] = []
    try:
        for child in module.modules():
            for own in (child._parameters, child._buffers):
                for name, held in list(own.items()):
                    if id(held) in stand:
                        undo.append((own, name, held))
                        own[name] = stand[id(held)]
            for name, value in list(vars(child).items()):
                if type(value) is list and any(id(x) in stand for x in value):  # recurrent layers list their weights once more
                    undo.append((vars(child), name, value))
                    vars(child)[name] = [stand.get(id(x), x) for x in value]
        yield Aliases(params, buffers)
    finally:
        for where, name, value in reversed(undo):
            where[name] = value


@contextlib.contextmanager
def flagged(modules: list[nn.Module], training: Sequence[bool]) -> Iterator[None]:
    """Within it submodules are in training, or not, as told."""
    now = [m.training for m in modules]
    try:
        for module, flag in zip(modules, training, strict=True):
            module.training = flag
        yield
    finally:
        for module, flag in zip(modules, now, strict=True):
            module.training = flag


def nodes_of(tensors: list[Tensor]) -> list[Any]:
    """The autograd graph behind some tensors."""
    seen: dict[Any, None] = {}
    todo: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen[node] = None
            todo.extend(n for n, _ in node.next_functions if n is not None)
    return list(seen)


def leaves_of(tensors: list[Tensor]) -> list[Tensor]:
    """The leaves that autograd would give gradients to."""
    return [node.variable for node in nodes_of(tensors) if hasattr(node, "variable")]


def reached(tensors: list[Tensor]) -> set[int]:
    """Identities of the leaves that each of some tensors depends on: a backward through any of them gives those a gradient."""
    found = [{id(leaf) for leaf in leaves_of([t])} for t in tensors]
    return set.intersection(*found) if found else set()


class Take:
    """One run of the network on fresh leaves, forward and then backward. Used up by it."""

    def __init__(self, module: nn.Module, leaves: list[Any], statics: list[Any], spec: Any) -> None:
        self._module = module
        fresh: dict[int, Tensor] = {}
        self.inputs: list[Any] = []
        for leaf, static in zip(leaves, statics, strict=True):
            if isinstance(static, Tensor):
                if id(static) not in fresh:
                    fresh[id(static)] = static.data.requires_grad_(leaf.requires_grad)
                static = fresh[id(static)]
            self.inputs.append(static)
        self._spec, self._given = spec, tree.unflatten(self.inputs, spec)

    def forward(self, params: list[nn.Parameter], wrt: list[int]) -> Outputs:
        args, kwargs = self._given
        with torch.enable_grad():
            self.outputs = Outputs.of(self._module(*args, **kwargs), self.inputs)
        if not tree.alike(self._given, self.inputs, self._spec):
            raise CaptureRefused("input-mutation", "the network changes a container among its arguments, which a replay would not")
        self.targets: list[Tensor] = [*(self.inputs[i] for i in wrt), *params]
        return self.outputs

    def backward(self, incoming: list[Any]) -> list[Tensor | None]:
        made = [self.outputs.tensors[i] for i in self.outputs.differentiable()]
        if len(made) != len(incoming):
            raise CaptureRefused("python-counter", "the network's outputs are others from one step to the next")
        roots = [(t, g) for t, g in zip(made, incoming, strict=True) if g is not None]
        if not roots or not self.targets:
            return [None] * len(self.targets)
        if any(node.name() == _REENTRANT for node in nodes_of([t for t, _ in roots])):
            raise CaptureRefused("host-state", "checkpoint(use_reentrant=True) gives its gradients to .grad alone: use_reentrant=False")
        with torch.autograd.set_multithreading_enabled(False), torch.autocast("cuda", enabled=False):
            outs, grads = [t for t, _ in roots], [g for _, g in roots]
            return list(torch.autograd.grad(outs, self.targets, grads, allow_unused=True))


def check(take: Take, layouts: tuple[Layout, ...]) -> None:
    """Raises CaptureRefused where what a forward gave back, or what would get its gradients, is nothing that a graph can give."""
    outputs = take.outputs
    if foreign := tree.opaque([x for kind, x in outputs.plan if kind == "fixed"]):
        raise CaptureRefused("host-state", f"an output is a {foreign[0].__qualname__}, whose tensors cannot be seen")
    known = {id(t) for t in take.targets}
    for t in outputs.tensors:
        if type(t) is not Tensor or t.layout is not torch.strided or t.is_conj() or t.is_neg() or id(t) in known or not on_device(t):
            raise CaptureRefused("unknown", f"an output is a {type(t).__name__} on {t.device}: only plain device tensors are captured")
    if ODD in layouts or len(outputs.differentiable()) != len(layouts):
        raise CaptureRefused("grad-layout", "the gradients of the outputs are not plain tensors, or not those of the earlier steps")
    for leaf in leaves_of(outputs.tensors):
        if id(leaf) not in known:
            raise CaptureRefused(
                "grad-accumulation", f"a {tuple(leaf.shape)} leaf gets a gradient that is no parameter of the module and no input"
            )
