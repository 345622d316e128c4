"""The changed conditions under which two arms are compared again: what each may prove, what it costs, and how it is applied.

A condition of kind ``both`` is a setting of the process, applied around both arms, capture included. One of kind ``eager`` makes the
eager arm do what a capture like upstream's does; ``twist`` says which, and the training step obeys.

cuBLAS: ``torch.use_deterministic_algorithms`` covers it only if ``CUBLAS_WORKSPACE_CONFIG`` is set when torch makes the first
cuBLAS handle, so a child needs ``CHILD_ENVIRONMENT`` before it starts CUDA; ``workspace_problem`` tells when it had not. (Source:
torch's notes on reproducibility, and ATen/Context.cpp, which reads the variable once.) A missing setting never makes a false proof,
since agreement is compared bit for bit; it can only hide a true one.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch

from parity.judge.counterfactual.substitutes import SUBSTITUTES, substituted

CHILD_ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
_WORKSPACES: Final = (":4096:8", ":16:8")


@dataclass(frozen=True)
class Condition:
    """``cause``: what it proves if the arms need it. ``cost``: rank, cheapest first. ``kind``: both, eager. ``needs``: traits of a step
    (see ``traits``) without which the condition cannot matter."""

    name: str
    cause: str
    cost: int
    kind: str
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class EagerTwist:
    """What the eager step does otherwise: the weight cache of autocast; whether the backward of its network, and not that of its loss,
    runs within autocast; whether the gradients of its outputs are copied into buffers laid out like the outputs."""

    autocast_cache: bool = True
    backward_inside_autocast: bool = False
    incoming_layout: bool = False


_PREFIX: Final = "substitute:"


def _table() -> tuple[Condition, ...]:
    rows = [
        ("rng-aligned", "rng", "both", {"random"}),
        ("autocast-cache-off", "autocast-cache", "eager", {"autocast"}),
        ("backward-inside-autocast", "autocast-backward", "eager", {"autocast"}),
        ("incoming-layout-of-outputs", "grad-layout", "eager", set()),
        ("cudnn-deterministic", "nondeterministic-kernel", "both", {"cuda"}),
        ("tf32-off", "reduction-order", "both", {"cuda"}),
        ("deterministic-algorithms", "nondeterministic-kernel", "both", set()),
        ("math-sdpa", "nondeterministic-kernel", "both", {"sdpa"}),
        *((_PREFIX + s.name, "nondeterministic-kernel", "both", {_PREFIX + s.name}) for s in SUBSTITUTES),
    ]
    return tuple(Condition(name, cause, i, kind, frozenset(needs)) for i, (name, cause, kind, needs) in enumerate(rows))


CONDITIONS: Final = _table()
_NAMES: Final = tuple(c.name for c in CONDITIONS)


def _checked(names: Iterable[str]) -> frozenset[str]:
    wanted = frozenset(names)
    if unknown := sorted(wanted - set(_NAMES)):
        raise ValueError(f"no condition is called {', '.join(unknown)}: {', '.join(_NAMES)}")
    return wanted


def twist(names: Iterable[str]) -> EagerTwist:
    """What the eager arm does otherwise under these conditions. Raises ValueError for unknown names."""
    wanted = _checked(names)
    return EagerTwist("autocast-cache-off" not in wanted, "backward-inside-autocast" in wanted, "incoming-layout-of-outputs" in wanted)


def traits(*, autocast: bool, random: bool, cuda: bool, remedies: Iterable[str]) -> frozenset[str]:
    """What a step has that conditions act upon. ``random``: a generator moves; ``cuda``: real kernels, not emulated ones;
    ``remedies``: of the noisy ops that ran (``parity.judge.counterfactual.noise``)."""
    found = {name for name, there in (("autocast", autocast), ("random", random), ("cuda", cuda)) if there}
    for remedy in remedies:
        if remedy == "math-sdpa":
            found.add("sdpa")
        elif remedy.startswith(_PREFIX):
            found.add(remedy)
    return frozenset(found)


def applicable(has: Collection[str]) -> tuple[Condition, ...]:
    """The conditions that can matter to a step with these traits, cheapest first."""
    return tuple(c for c in CONDITIONS if c.needs <= set(has))


@contextlib.contextmanager
def applied(names: Iterable[str]) -> Iterator[None]:
    """Within it the conditions of kind ``both`` hold; those of kind ``eager`` are the step's to obey (``twist``). On leaving, also by
    an error, every global setting is as it was. Warnings that an op has no deterministic implementation are not shown.

    ``rng-aligned`` seeds on entering; a step that is to start from there again after a capture calls ``align``.
    Raises ValueError for unknown names.
    """
    wanted = _checked(names)
    with contextlib.ExitStack() as stack:
        for condition in CONDITIONS:
            if condition.name in wanted and condition.name in _SETTINGS:
                stack.enter_context(_SETTINGS[condition.name]())
        stack.enter_context(substituted(n.removeprefix(_PREFIX) for n in _NAMES if n in wanted and n.startswith(_PREFIX)))
        yield


def align(seed: int = 0) -> None:
    """Seeds every generator that a step may draw from: torch's, Python's, NumPy's where it is loaded."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def workspace_problem() -> str:
    """Empty if cuBLAS is deterministic under ``deterministic-algorithms``, else what is wrong. Runs one small product on the device, in
    which torch itself says whether it has seen the setting; starts CUDA where there is one."""
    value = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    if value not in _WORKSPACES:
        return f"CUBLAS_WORKSPACE_CONFIG={value!r} is none of {', '.join(_WORKSPACES)}"
    with warnings.catch_warnings(record=True) as told, _deterministic_algorithms():
        warnings.simplefilter("always")
        unit = torch.ones(2, 2, device="cuda" if torch.cuda.is_available() else "cpu")
        torch.mm(unit, unit)
    if any("CUBLAS_WORKSPACE_CONFIG" in str(w.message) for w in told):
        return "CUBLAS_WORKSPACE_CONFIG was set after torch had read it: it must be in the environment before CUDA starts"
    return ""


@contextlib.contextmanager
def _aligned() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    host, python = torch.get_rng_state(), random.getstate()
    legacy = numpy.random.get_state() if numpy is not None else None
    device = [(g, g.get_state()) for g in torch.cuda.default_generators]
    try:
        align()
        yield
    finally:
        torch.set_rng_state(host)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(legacy)
        for generator, state in device:
            generator.set_state(state)


@contextlib.contextmanager
def _cudnn_deterministic() -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    try:
        cudnn.deterministic, cudnn.benchmark = True, False
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


@contextlib.contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    inductor: Any = sys.modules.get("torch._inductor.config")  # use_deterministic_algorithms sets a flag there, too
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    compiled = getattr(inductor, "deterministic", None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Dd]eterministic")
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            if compiled is not None:  # where it was not loaded, what torch sets on leaving is its default
                inductor.deterministic = compiled


_GROUPS: Final = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
_LEAVES: Final = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"))


def _own_precisions(get: Any, put: Any) -> list[str]:
    """What each leaf was set to itself: read while the groups, from which a leaf set to ``none`` inherits, say nothing."""
    groups = []
    for group in _GROUPS:  # outermost first, so that each is read without what it inherits
        groups.append(get(*group))
        put(*group, "none")
    own = [get(*leaf) for leaf in _LEAVES]
    for group, value in zip(_GROUPS, groups, strict=True):
        put(*group, value)
    return own


def _legacy() -> tuple[str, bool] | None:
    """The older settings, or None where the newer ones are in use, which the older ones then refuse to be read beside."""
    try:
        return torch.get_float32_matmul_precision(), torch._C._get_cudnn_allow_tf32()
    except RuntimeError:
        return None


def _set_legacy(matmul: str, cudnn: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a newer way to say this
        torch.set_float32_matmul_precision(matmul)
        torch._C._set_cudnn_allow_tf32(cudnn)


@contextlib.contextmanager
def _tf32_off() -> Iterator[None]:
    """Both of torch's ways to say so are set alike, because a model that reads the one after only the other was set gets an error."""
    get: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
    put: Any = getattr(torch._C, "_set_fp32_precision_setter", None)
    legacy = _legacy()
    own = _own_precisions(get, put) if get is not None else []
    try:
        if legacy is not None:
            _set_legacy("highest", False)
        for leaf in _LEAVES if get is not None else ():
            put(*leaf, "ieee")
        yield
    finally:
        if legacy is not None:
            _set_legacy(*legacy)
        for leaf, value in zip(_LEAVES, own, strict=False):
            put(*leaf, value)


@contextlib.contextmanager
def _math_sdpa() -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


_SETTINGS: Final[Mapping[str, Callable[[], contextlib.AbstractContextManager[None]]]] = MappingProxyType(
    {
        "rng-aligned": _aligned,
        "cudnn-deterministic": _cudnn_deterministic,
        "tf32-off": _tf32_off,
        "deterministic-algorithms": _deterministic_algorithms,
        "math-sdpa": _math_sdpa,
    }
)
