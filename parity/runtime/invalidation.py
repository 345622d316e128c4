"""Noticing that a module is no longer the one a graph was captured from.

Two costs. ``CLOCK`` is a number that moves whenever torch is told of a change (a registration, ``_apply``, ``load_state_dict``,
``train``, a deleted attribute, an optimizer step), anywhere in the process: comparing it costs nothing. ``Watch.look`` compares every
submodule and every address, and is done once per outermost scope and whenever the clock moved.

Only ``look`` sees ``p.data = t``, ``_parameters[name] = t``, ``m.training = flag`` and ``requires_grad_``: inside a scope they stay
unseen until it ends. Nothing here sees attributes that are neither parameter, buffer nor submodule, nor hooks added to a submodule.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_post_hook


class _Clock:
    """``changes``: of any kind. ``weights``: those that may have changed values without moving a version counter."""

    def __init__(self) -> None:
        self.changes = 0
        self.weights = 0
        self.installed = False

    def install(self) -> None:
        """Registers the hooks and wraps the four methods, once per process."""
        if self.installed:
            return
        self.installed = True
        hooks.register_module_parameter_registration_hook(self._structure)
        hooks.register_module_buffer_registration_hook(self._structure)
        hooks.register_module_module_registration_hook(self._structure)
        register_optimizer_step_post_hook(self._step)
        for name, weights in (("_apply", True), ("load_state_dict", True), ("train", False), ("__delattr__", False)):
            setattr(nn.Module, name, self._wrapped(getattr(nn.Module, name), weights))

    def _structure(self, module: nn.Module, name: str, value: Any) -> None:
        self.changes += 1

    def _step(self, *_: Any) -> None:
        self.changes += 1
        self.weights += 1

    def _wrapped(self, method: Callable[..., Any], weights: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(module, *args, **kwargs)
            finally:  # also half done
                self.changes += 1
                self.weights += weights

        return wrapper


CLOCK: Final = _Clock()


class _Local(threading.local):
    """``visit``: number of the outermost scope this thread is in, 0 outside. ``after``: calls of a signature before it is captured.
    ``busy``: it warms up, traces or captures."""

    depth = 0
    visit = 0
    after = 1
    busy = False


LOCAL: Final = _Local()
_visits = itertools.count(1)


@contextmanager
def scope(after: int = 1) -> Iterator[None]:
    """A capture scope: within the outermost one a module is checked in full once, outside of any at every call.

    ``after``: the call of a signature at which it is captured."""
    outer, LOCAL.after = LOCAL.after, after
    if LOCAL.depth == 0:
        LOCAL.visit = next(_visits)
    LOCAL.depth += 1
    try:
        yield
    finally:
        LOCAL.after = outer
        LOCAL.depth -= 1
        if LOCAL.depth == 0:
            LOCAL.visit = 0


class Watch:
    """A module as it was when last looked at. Keeps no parameter and no submodule alive."""

    def __init__(self, module: nn.Module) -> None:
        self._root = weakref.ref(module)
        self._take(module)

    def _take(self, root: nn.Module) -> None:
        modules: list[nn.Module] = [root]
        index = {id(root): 0}
        kids: list[int] = []
        for module in modules:  # grows while it is walked
            for child in module._modules.values():
                if child is None:
                    kids.append(-1)
                    continue
                if id(child) not in index:
                    index[id(child)] = len(modules)
                    modules.append(child)
                kids.append(index[id(child)])
        self._modules = [weakref.ref(m) for m in modules]
        self._kids = kids
        tensors = _tensors(modules)
        self._places = _places(tensors)
        self.training = tuple([m.training for m in modules])
        self.grads = _grads(tensors)

    def look(self) -> str:
        """What changed of the structure or the addresses since the last look, in words; empty where nothing did.

        Changed flags (``training``, ``requires_grad``) are taken over in silence: the caller compares them.
        """
        root = self._root()
        if root is None:
            return "the module is gone"
        modules = [ref() for ref in self._modules]
        expected = [*modules, None]  # the last one answers for -1
        found: list[Any] = []
        for module in modules:
            if module is None:
                self._take(root)
                return "a submodule was removed or replaced"
            found.extend(module._modules.values())
        alive: list[nn.Module] = modules  # type: ignore[assignment]
        if len(found) != len(self._kids) or not all(map(is_, found, [expected[k] for k in self._kids])):
            self._take(root)
            return "a submodule was added, removed or replaced"
        tensors = _tensors(alive)
        places = _places(tensors)
        if len(places[0]) != len(self._places[0]):
            self._take(root)
            return "a parameter or buffer was added or removed"
        if places != self._places:
            self._take(root)
            return "a parameter or buffer moved, was replaced or changed its type or shape"
        self.training = tuple([m.training for m in alive])
        self.grads = _grads(tensors)
        return ""

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers, as they are now."""
        modules = [m for ref in self._modules if (m := ref()) is not None]
        return [t for t in _tensors(modules) if t is not None]

    def versions(self) -> int | None:
        """A number that moves when values change through autograd-visible operations; None where some tensor counts none."""
        tensors = self.tensors()
        if any(t.is_inference() for t in tensors):
            return None
        return sum(t._version for t in tensors)


def _tensors(modules: list[nn.Module]) -> list[Tensor | None]:
    return list(chain.from_iterable(chain(m._parameters.values(), m._buffers.values()) for m in modules))


def _grads(tensors: list[Tensor | None]) -> tuple[bool, ...]:
    return tuple([t is not None and t.requires_grad for t in tensors])


def _places(tensors: list[Tensor | None]) -> tuple[list[Any], ...]:
    """What a graph holds fixed of tensors: which are there, addresses, types and geometry. Column by column, which is what is fast."""
    there = [t for t in tensors if t is not None]
    missing = [t is None for t in tensors]
    try:
        return missing, [t.data_ptr() for t in there], [t.dtype for t in there], [t.shape for t in there], [t.stride() for t in there]
    except (RuntimeError, NotImplementedError):  # sparse, or wrapped by a subclass: nothing but the object itself tells
        return missing, list(map(_address, there)), [t.dtype for t in there], [t.shape for t in there]


def _address(tensor: Tensor) -> Any:
    try:
        return tensor.data_ptr(), tensor.stride()
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def generators(module: nn.Module | None) -> list[torch.Generator]:
    """The device generators that a module holds in attributes, lists and dicts of its own."""
    found: dict[int, torch.Generator] = {}
    for child in module.modules() if module is not None else ():
        for value in vars(child).values():
            values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
            for item in values:
                if isinstance(item, torch.Generator) and item.device.type == "cuda":
                    found.setdefault(id(item), item)
    return list(found.values())
