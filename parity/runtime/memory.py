"""What Python keeps of a module from step to step, where no buffer shows it: seen, compared, and put back.

Attributes, those of its classes, whatever lies in containers and plain objects among them, and the random streams of the host that they
hold. Out of sight: iterators, objects with slots, closures, globals.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_OWNED: Final = frozenset(vars(nn.Module())) - {"training"}
"""What each module has of torch: parameters and buffers, which others see to, and hooks."""
_DEPTH: Final = 4
_INDEXED: Final = (dict, list, tuple, deque, set, frozenset)
_CODE: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_FOREIGN: Final = frozenset({"torch", *sys.stdlib_module_names})
"""Whose objects mind their own business: handles, locks, loggers, compiled modules."""


class _Stream:
    """A random stream of the host, or an array: both hold a state that is no attribute."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.state = self._now()

    @staticmethod
    def fits(value: Any) -> bool:
        numpy = sys.modules.get("numpy")
        if isinstance(value, torch.Generator):
            return value.device.type == "cpu"  # those of the device are put back with every other one of it
        if numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
            return True
        if numpy is not None and isinstance(value, numpy.ndarray):
            return not value.dtype.hasobject
        return isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)

    def _now(self) -> Any:
        value = self.value
        if isinstance(value, torch.Generator):
            return value.get_state()
        if isinstance(value, random.Random):
            return value.getstate()
        if hasattr(value, "bit_generator"):
            return value.bit_generator.state
        return value.get_state() if hasattr(value, "get_state") else value.copy()

    def digest(self) -> str:
        state = self.state
        if isinstance(state, Tensor):
            told = state.numpy().tobytes()
        elif hasattr(state, "tobytes"):
            told = repr((state.dtype, state.shape)).encode() + state.tobytes()
        else:
            told = _told(state).encode()
        return hashlib.sha256(told).hexdigest()

    def restore(self) -> None:
        value, now = self.value, _Stream(self.value)
        if now.digest() == self.digest():
            return
        if isinstance(value, random.Random):
            value.setstate(self.state)
        elif hasattr(value, "bit_generator"):
            value.bit_generator.state = self.state
        elif hasattr(value, "set_state"):
            value.set_state(self.state)
        else:
            value[...] = self.state


def _told(state: Any) -> str:
    """Every number of a nested state; the text of a large array leaves most of them out."""
    if isinstance(state, dict):
        return repr([(key, _told(item)) for key, item in state.items()])
    if isinstance(state, (list, tuple)):
        return repr([_told(item) for item in state])
    return repr(state.tolist() if hasattr(state, "tolist") else state)


def _contents(value: Any) -> dict[Any, Any] | None:
    """What a container or a plain object holds, by key; None where it is neither."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(list(value)))
    if isinstance(value, (set, frozenset)):
        return {item: item for item in list(value)}
    if isinstance(value, type):
        return {k: v for k, v in list(vars(value).items()) if not k.startswith("__") and not isinstance(v, _CODE)}
    if isinstance(value, (nn.Module, Tensor, *_CODE)) or not hasattr(value, "__dict__"):
        return None
    known = isinstance(value, types.SimpleNamespace) or type(value).__module__.partition(".")[0] not in _FOREIGN
    return dict(vars(value)) if known else None


class Memory:
    """What is kept in a module. ``places``: numbers, words, tensors, and digests of streams, by path."""

    def __init__(self, module: nn.Module) -> None:
        self.places: dict[str, Any] = {}
        self._holders: list[tuple[Any, dict[Any, Any]]] = []
        self._streams: list[_Stream] = []
        seen: set[int] = set()
        for name, child in module.named_modules():
            own = {k: v for k, v in vars(child).items() if k not in _OWNED}
            for key, value in own.items():
                self._walk(f"{name}.{key}".lstrip("."), value, _DEPTH, seen)
            for kind in type(child).__mro__:
                if kind.__module__.partition(".")[0] not in (*_FOREIGN, "builtins"):
                    self._walk(f"class {kind.__qualname__}", kind, _DEPTH, seen)

    def _walk(self, path: str, value: Any, left: int, seen: set[int]) -> None:
        if isinstance(value, Tensor) or type(value) in _PLAIN:
            self.places[path] = value
            return
        if not left or id(value) in seen:
            return
        seen.add(id(value))
        if _Stream.fits(value):
            self._streams.append(_Stream(value))
            self.places[path] = self._streams[-1].digest()
        elif (held := _contents(value)) is not None:
            self._holders.append((value, held))
            for key, item in held.items():
                self._walk(f"{path}[{key!r}]" if isinstance(value, _INDEXED) else f"{path}.{key}", item, left - 1, seen)

    def change(self, after: Memory, *, tensors: bool = True) -> str:
        """The first place that holds something else afterwards, or empty. ``tensors``: whether those count."""
        missing = object()
        pairs = {
            place: (self.places.get(place, missing), after.places.get(place, missing)) for place in {**self.places, **after.places}
        }
        kept = {place: any(isinstance(x, Tensor) for x in pair) for place, pair in pairs.items()}
        for place in sorted(pairs, key=kept.__getitem__, reverse=True):  # a tensor says more than a count beside it
            was, now = pairs[place]
            if was is not now and (tensors if kept[place] else _told(was) != _told(now)):
                return place
        return ""

    def restore(self, *, tensors: bool) -> None:
        """Puts contents of containers and objects, and streams, back. ``tensors``: with what is no number or word, too; else a cache
        that was filled meanwhile stays."""
        for value, held in self._holders:
            _refill(value, held, tensors)
        self.restore_streams()

    def restore_streams(self) -> None:
        for stream in self._streams:
            stream.restore()


def _refill(value: Any, held: dict[Any, Any], tensors: bool) -> None:
    now = _contents(value) or {}
    if isinstance(value, (tuple, frozenset)) or (now.keys() == held.keys() and all(now[k] is v for k, v in held.items())):
        return
    if isinstance(value, (list, deque, set)):
        if tensors or all(type(x) in _PLAIN for x in (*now.values(), *held.values())):
            value.clear()
            value.update(held.values()) if isinstance(value, set) else value.extend(held.values())
        return
    put, drop = (value.__setitem__, value.__delitem__) if isinstance(value, dict) else (_setter(value), _deleter(value))
    for key in now.keys() - held.keys():
        if tensors or type(now[key]) in _PLAIN:
            drop(key)
    for key, item in held.items():
        if key not in now or (now[key] is not item and (tensors or type(item) in _PLAIN)):
            put(key, item)


def _setter(value: Any) -> Any:
    return lambda name, item: type.__setattr__(value, name, item) if isinstance(value, type) else vars(value).__setitem__(name, item)


def _deleter(value: Any) -> Any:
    return lambda name: type.__delattr__(value, name) if isinstance(value, type) else vars(value).__delitem__(name)


@contextlib.contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Puts every attribute back that is replaced, added or deleted. What is changed within a container stays where all goes well, so
    that a cache keeps what it was filled with; where an error leaves, that is put back, too: the steps to come are eager's."""
    before = [(m, dict(vars(m))) for m in module.modules()]
    memory = Memory(module)
    try:
        yield
    except BaseException:
        memory.restore(tensors=True)
        raise
    finally:
        for child, old in before:
            for name in vars(child).keys() - old.keys():
                delattr(child, name)
            vars(child).update(old)
