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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not, methodcaller
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


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

    visit = 0
    after = 1
    busy = False


LOCAL: Final = _Local()
_visits = itertools.count(1)


def opened(local: threading.local, name: str, value: Any, outside: Any) -> Callable[[], bool]:
    """From now on ``name`` of this thread is ``value``; ``outside`` where nothing is open. Returns what ends that, and tells whether it
    was the last. In any order, and from any thread: a generator that is suspended within a scope may end after one that was opened
    later, or be closed by another thread."""
    mine, token = vars(local), object()
    held: dict[object, Any] = mine.setdefault(f"open {name}", {})
    held[token] = mine[name] = value

    def close() -> bool:
        del held[token]
        mine[name] = next(reversed(held.values()), outside)
        return not held

    return close


@contextmanager
def scope(after: int = 1) -> Iterator[None]:
    """A capture scope: within the outermost one a module is checked in full once, outside of any at every call.

    ``after``: the call of a signature at which it is captured."""
    if LOCAL.visit == 0:
        LOCAL.visit = next(_visits)
    mine, close = vars(LOCAL), opened(LOCAL, "after", after, 1)
    try:
        yield
    finally:
        if close():
            mine["visit"] = 0


class Watch:
    """A module as it was when last looked at. Keeps no parameter and no submodule alive."""

    def __init__(self, module: nn.Module) -> None:
        self._root = weakref.ref(module)
        self._take(module)

    def _take(self, root: nn.Module) -> None:
        modules: list[nn.Module] = [root]
        index = {id(root): 0}
        for module in modules:  # grows while it is walked
            for child in module._modules.values():
                if child is not None and id(child) not in index:
                    index[id(child)] = len(modules)
                    modules.append(child)
        parameters, buffers, children, self.training = zip(*map(_INSIDES, modules), strict=True)
        self._modules = [weakref.ref(m) for m in modules]
        self._lengths = list(map(len, children))
        self._kids = [-1 if m is None else index[id(m)] for m in _values(children)]
        tensors = list(_values(chain(parameters, buffers)))
        self._there = [t is not None and not is_lazy(t) for t in tensors]
        self._missing = [not there for there in self._there]
        there = list(compress(tensors, self._there))
        self.grads = _grads(there)
        self._wrapped = [i for i, t in enumerate(there) if is_traceable_wrapper_subclass(t)]
        self._contents = [_inside(there[i]) for i in self._wrapped]
        self._places = _places(there)
        self._alike = _guard(there)

    def look(self) -> str:
        """What changed of the structure or the addresses since the last look, in words; empty where nothing did.

        Changed flags (``training``, ``requires_grad``) are taken over in silence: the caller compares them.
        """
        root = self._root()
        if root is None:
            return "the module is gone"
        what = self._look()
        if what:
            self._take(root)
        return what

    def _look(self) -> str:
        modules: list[nn.Module | None] = [ref() for ref in self._modules]
        try:
            parameters, buffers, children, training = zip(*map(_INSIDES, modules), strict=True)
        except AttributeError:  # None has none
            return "a submodule was removed or replaced"
        modules.append(None)  # for -1
        if list(map(len, children)) != self._lengths or not all(map(is_, _values(children), map(modules.__getitem__, self._kids))):
            return "a submodule was added, removed or replaced"
        tensors = list(_values(chain(parameters, buffers)))
        if len(tensors) != len(self._there):
            return "a parameter or buffer was added or removed"
        there = list(compress(tensors, self._there))
        if any(map(is_not, compress(tensors, self._missing), repeat(None))) or not self._stand(there):
            return "a parameter or buffer moved, was replaced or changed its type or shape"
        self.training, self.grads = training, _grads(there)
        return ""

    def _stand(self, tensors: list[Tensor]) -> bool:
        """Whether all are where and what they were."""
        if self._wrapped and [_inside(tensors[i]) for i in self._wrapped] != self._contents:
            return False
        try:
            addresses = [t.data_ptr() for t in tensors]
        except (AttributeError, RuntimeError, NotImplementedError):  # None, sparse, or wrapped by a subclass
            return not any(t is None for t in tensors) and _places(tensors) == self._places
        if addresses == self._places[0] and self._alike is not None and self._alike(*tensors):
            return True
        if _places(tensors) != self._places:
            return False
        self._alike = _guard(tensors)  # grad mode, or another state of this thread, is not that of the last look
        return True

    def modules(self) -> list[nn.Module]:
        """Those that live, in the order of ``training``."""
        return [m for ref in self._modules if (m := ref()) is not None]

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers, as they are now."""
        modules = self.modules()
        return [
            t for t in _values(chain.from_iterable((m._parameters, m._buffers) for m in modules)) if t is not None and not is_lazy(t)
        ]

    def versions(self) -> int | None:
        """A number that moves when values change through autograd-visible operations; None where some tensor counts none."""
        try:
            return sum([t._version for t in self.tensors()])
        except RuntimeError:  # of a tensor made in inference mode
            return None


_INSIDES = attrgetter("_parameters", "_buffers", "_modules", "training")


_VALUES = methodcaller("values")  # what a TorchScript module has is no dict


def _values(dicts: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(_VALUES, dicts))


def _grads(tensors: list[Tensor]) -> tuple[bool, ...]:
    return tuple([t.requires_grad for t in tensors])


def _guard(tensors: list[Tensor]) -> Callable[..., bool] | None:
    """What tells whether tensors are of the types and the geometry of these, all at once, by what torch guards compiled code with; it
    also denies it where the state of the thread is another. None where this torch, or one of the tensors, does not allow it."""
    kind: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    first = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
    once = [first[id(t)] == i for i, t in enumerate(tensors)]
    try:
        check: Any = kind(*compress(tensors, once), dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (TypeError, RuntimeError, NotImplementedError):
        return None
    ties = [(first[id(t)], i) for i, t in enumerate(tensors) if not once[i]]
    return check if not ties else lambda *found: all(found[a] is found[b] for a, b in ties) and check(*compress(found, once))


def _places(tensors: list[Tensor]) -> tuple[list[Any], ...]:
    """What a graph holds fixed of tensors: addresses, types and geometry. Column by column, which is what is fast."""
    try:
        addresses = [t.data_ptr() for t in tensors]
        return addresses, [t.dtype for t in tensors], [t.shape for t in tensors], [t.stride() for t in tensors], _kinds(tensors)
    except (RuntimeError, NotImplementedError):  # nothing but the object itself tells
        return list(map(_address, tensors)), [t.dtype for t in tensors], [t.shape for t in tensors], _kinds(tensors)


def _kinds(tensors: list[Tensor]) -> list[Any]:
    """Types; a parameter computes as a plain tensor does."""
    return [Tensor if kind is nn.Parameter else kind for kind in map(type, tensors)]


def _inside(tensor: Any) -> Any:
    """Types and addresses of what a wrapper holds, such as a quantized weight, which has no address of its own."""
    if not is_traceable_wrapper_subclass(tensor):
        return None if tensor is None else (_address(tensor), tensor.dtype, tensor.shape)
    return type(tensor), [(name, _inside(getattr(tensor, name))) for name in tensor.__tensor_flatten__()[0]]


def _address(tensor: Tensor) -> Any:
    try:
        return tensor.data_ptr(), tensor.stride()
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def generators(module: nn.Module | None, kind: str = "cuda") -> list[torch.Generator]:
    """The generators of a kind of device that a module holds in attributes, lists and dicts of its own."""
    found: dict[int, torch.Generator] = {}
    for child in module.modules() if module is not None else ():
        for value in vars(child).values():
            values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
            for item in values:
                if isinstance(item, torch.Generator) and item.device.type == kind:
                    found.setdefault(id(item), item)
    return list(found.values())
