"""What of torch is replaced while the device is entered, as (object, attribute, value)."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch._dynamo  # it keeps tables of torch's functions, and must see the original ones
import torch._lowrank
import torch.cuda.graphs
import torch.cuda.memory
import torch.cuda.random
import torch.jit._script
from torch import Tensor

from parity.runtime.legality import Violation

from . import generators, graph, streams
from .calls import has_device
from .memory import BLOCK, LEDGER, block_of, is_marked, is_pinned, mark, pin
from .state import CUDA, STATE
from .tape import look

Patch = tuple[Any, str, Any]
_SYNCHRONIZE: Final = torch.cuda.synchronize  # the original, which the legality table knows
_MEMORY: Final = 2**37  # bytes, of which nothing is ever refused


def _no(*_: Any, **__: Any) -> bool:
    return False


def _no_override(*_: Any, **__: Any) -> bool:
    return False


torch.jit._script._register_builtin(_no_override, "aten::has_torch_function")


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _synchronize(*_: Any, **__: Any) -> None:
    STATE.refuse_call(_SYNCHRONIZE)


class _DeviceScope:
    """``torch.cuda.device(...)`` and ``device_of``: there is one device."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0
        self.prev_idx = -1

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


def _pin_memory(tensor: Tensor, *_: Any) -> Tensor:
    if is_marked(tensor):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return tensor if is_pinned(tensor) else pin(tensor.clone())


# ---------------------------------------------------------------- torch outside torch.cuda
def _transparent() -> Iterator[Patch]:
    """Python composites must not stop at our function mode: a mode is off inside its own handler, and they would see the host."""
    modules = (
        torch.overrides, torch.functional, torch.nn.functional, torch._tensor, torch.autograd, torch._lowrank, torch.jit._script
    )  # fmt: skip
    for module in modules:
        for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
            if hasattr(module, name):
                yield module, name, _no_override


def _tensors() -> Iterator[Patch]:
    text = torch._tensor_str._str

    def _str(tensor: Tensor, **options: Any) -> str:
        STATE.refuse_call(Tensor.__repr__, (tensor,))
        look((block_of(tensor),))
        return str(text(tensor, **options))  # type: ignore[no-untyped-call]

    deep = torch.storage._StorageBase.__deepcopy__

    def deepcopy(self: Any, memo: Any) -> Any:
        if getattr(self, BLOCK, None) is None:
            return deep(self, memo)  # type: ignore[no-untyped-call]
        done = memo.setdefault("torch", {})
        if self._cdata not in done:
            done[self._cdata] = torch.empty(0, dtype=torch.uint8, device=CUDA).set_(self).clone().untyped_storage()
        return done[self._cdata]

    engine = torch.autograd.graph._engine_run_backward

    def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        before, STATE.context = STATE.context, has_device(t_outputs)
        try:
            return engine(t_outputs, *args, **kwargs)
        finally:
            STATE.context = before

    # on the class, not in the function mode: hooks and Python kernels run where modes are off, and must be told the same
    real = {name: getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu")}
    get_device = Tensor.get_device
    exchange = torch.utils.dlpack.from_dlpack

    def from_dlpack(source: Any, **options: Any) -> Tensor:
        return source.detach() if isinstance(source, Tensor) and is_marked(source) else exchange(source, **options)

    yield torch, "from_dlpack", from_dlpack
    yield torch.utils.dlpack, "from_dlpack", from_dlpack
    yield Tensor, "device", property(lambda t: CUDA if is_marked(t) else real["device"](t))
    yield Tensor, "is_cuda", property(lambda t: is_marked(t) or real["is_cuda"](t))
    yield Tensor, "is_cpu", property(lambda t: not is_marked(t) and real["is_cpu"](t))
    yield Tensor, "get_device", lambda t: 0 if is_marked(t) else get_device(t)
    yield Tensor, "is_pinned", lambda t, *_: is_pinned(t)
    yield Tensor, "pin_memory", _pin_memory
    yield torch._tensor_str, "_str", _str
    yield torch.storage._StorageBase, "__deepcopy__", deepcopy
    yield torch.autograd, "_engine_run_backward", run_backward
    yield torch.autograd.graph, "_engine_run_backward", run_backward
    yield Tensor, "record_stream", _nothing  # the C parser wants a real stream; memory is not reused here


def _autocast() -> Iterator[Patch]:
    """Autocast for the device is the host's, with its operation lists, and CUDA's default type."""
    autocast = torch.amp.autocast_mode.autocast
    init = autocast.__init__

    def autocast_init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        init(self, device_type, dtype, enabled, cache_enabled)

    def on_host(function: Any) -> Any:
        return lambda device="cuda", *rest: function("cpu" if device == "cuda" else device, *rest)

    yield autocast, "__init__", autocast_init
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        yield torch, name, on_host(getattr(torch, name))
    yield torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cuda")


# ---------------------------------------------------------------- torch.cuda
def _device() -> dict[str, Any]:
    properties = types.SimpleNamespace(name="emulated", major=9, minor=0, total_memory=_MEMORY, multi_processor_count=1, warp_size=32)
    return {
        "is_available": _yes,
        "is_initialized": _yes,
        "_initialized": True,
        "init": _nothing,
        "_lazy_init": _nothing,
        "device_count": _constant(1),
        "current_device": _constant(0),
        "set_device": _nothing,
        "device": _DeviceScope,
        "device_of": _DeviceScope,
        "get_device_name": _constant("emulated"),
        "get_device_capability": _constant((9, 0)),
        "get_device_properties": _constant(properties),
        "is_bf16_supported": _yes,
        "synchronize": _synchronize,
        "ipc_collect": _nothing,
    }


def _streams() -> dict[str, Any]:
    return {
        "Stream": streams.Stream,
        "Event": streams.Event,
        "StreamContext": streams.StreamContext,
        "stream": streams.StreamContext,
        "set_stream": streams.set_stream,
        "current_stream": lambda *_, **__: STATE.stream,
        "default_stream": lambda *_, **__: STATE.default,
    }


def _graphs() -> dict[str, Any]:
    return {
        "CUDAGraph": graph.CUDAGraph,
        "graph_pool_handle": graph.graph_pool_handle,
        "is_current_stream_capturing": lambda: STATE.stream.is_capturing(),
    }


def _memory() -> dict[str, Any]:
    def reset_peak(*_: Any, **__: Any) -> None:
        LEDGER.peak = LEDGER.allocated

    def stats(*_: Any, **__: Any) -> dict[str, int]:
        current, peak = LEDGER.allocated, LEDGER.peak
        return {
            f"{kind}_bytes.all.{when}": value
            for kind in ("allocated", "reserved", "active", "requested")
            for when, value in (("current", current), ("peak", peak))
        }

    return {
        "memory_allocated": lambda *_, **__: LEDGER.allocated,
        "memory_reserved": lambda *_, **__: LEDGER.allocated,
        "max_memory_allocated": lambda *_, **__: LEDGER.peak,
        "max_memory_reserved": lambda *_, **__: LEDGER.peak,
        "reset_peak_memory_stats": reset_peak,
        "reset_max_memory_allocated": reset_peak,
        "memory_stats": stats,
        "mem_get_info": lambda *_, **__: (_MEMORY - LEDGER.allocated, _MEMORY),
        "memory_snapshot": lambda *_, **__: [],
        "memory_summary": lambda *_, **__: f"emulated device: {LEDGER.allocated} bytes allocated, {LEDGER.peak} at most",
        "empty_cache": _nothing,
    }


def _accelerator() -> dict[str, Any]:
    return {
        "is_available": _yes,
        "device_count": _constant(1),
        "current_accelerator": _constant(CUDA),
        "current_device_index": _constant(0),
        "current_stream": lambda *_, **__: STATE.stream,
        "set_device_index": _nothing,
        "set_stream": streams.set_stream,
        "synchronize": _synchronize,
    }


def _files() -> Iterator[Patch]:
    """Saved tensors know where they were; ``torch.load(map_location="cuda")`` brings them back there."""
    tag, restore = torch.serialization.location_tag, torch.serialization.default_restore_location

    def location_tag(storage: Any) -> str:
        untyped = getattr(storage, "_untyped_storage", storage)
        if getattr(untyped, BLOCK, None) is None:
            return str(tag(storage))
        STATE.refuse(Violation("d2h-copy", "saving a tensor"))
        return "cuda:0"

    def restore_location(storage: Any, location: str) -> Any:
        if not location.startswith("cuda"):
            return restore(storage, location)  # type: ignore[no-untyped-call]
        mark(getattr(storage, "_untyped_storage", storage))
        return storage

    yield torch.serialization, "location_tag", location_tag
    yield torch.serialization, "default_restore_location", restore_location


def patches() -> Iterator[Patch]:
    yield from _transparent()
    yield from _tensors()
    yield from _autocast()
    yield from _files()
    for name, value in (_device() | _streams() | _graphs() | _memory()).items():
        yield torch.cuda, name, value
    yield from ((torch.cuda.graphs, name, value) for name, value in _graphs().items())
    yield from ((torch.cuda.memory, name, value) for name, value in _memory().items())
    for name in ("Stream", "Event"):
        yield torch.cuda.streams, name, getattr(streams, name)
    for name in ("_lazy_init", "current_device", "device_count", "is_initialized"):
        yield torch.cuda.random, name, _device()[name]
    yield torch.cuda, "default_generators", (generators.DEFAULT,)
    yield torch, "Generator", generators.GeneratorEntry
    yield torch.cuda.graphs.graph, "default_capture_stream", None
    yield torch._C, "_host_emptyCache", _nothing
    yield from ((torch.accelerator, name, value) for name, value in _accelerator().items())
    yield torch.backends.cudnn, "is_acceptable", _no  # recurrent layers: no cuDNN layout of weights
    for real, emulated in (
        (torch.cuda.Stream, streams.Stream), (torch.cuda.Event, streams.Event), (torch.cuda.CUDAGraph, graph.CUDAGraph)
    ):  # fmt: skip
        # whoever imported the class by name before meets the emulated one too
        yield real, "__new__", staticmethod(lambda cls, *args, _class=emulated, **kwargs: _class(*args, **kwargs))
