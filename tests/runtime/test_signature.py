"""The key of a call: alike for calls that one recording answers, unlike for everything that a recording holds fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.runtime import tree
from parity.runtime.signature import Signature, signature


def key(*args: Any, training: tuple[bool, ...] = ()) -> Signature:
    return signature(*tree.flatten(args), training)


X = torch.zeros(2, 3)

SAME = [
    ((X,), (torch.ones(2, 3),)),
    ((X, 1, "a", None), (torch.ones(2, 3), 1, "a", None)),
    (({"x": X},), ({"x": torch.ones(2, 3)},)),
    ((float("nan"),), (float("nan"),)),
    ((slice(1, 2),), (slice(1, 2),)),
    ((X, X), (X.clone(),) * 2),
]
UNLIKE = [
    ((X,), (torch.zeros(3, 2),)),
    ((X,), (torch.zeros(2, 3, dtype=torch.float64),)),
    ((X,), (torch.zeros(3, 2).t(),)),
    ((X,), (torch.zeros(2, 3).requires_grad_(),)),
    ((X,), ([X],)),
    ((X,), (X, None)),
    (({"x": X},), ({"y": X},)),
    ((X, 1), (X, 2)),
    ((X, 1), (X, True)),
    ((X, 1), (X, 1.0)),
    ((0.0,), (-0.0,)),
    ((slice(1, 2),), (slice(1, 3),)),
    ((X, X), (X, X.clone())),
    ((X, X[:1]), (X, torch.zeros(1, 3))),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_calls_that_one_recording_answers(one: Any, other: Any) -> None:
    assert key(*one) == key(*other)
    assert hash(key(*one)) == hash(key(*other))


@pytest.mark.parametrize(("one", "other"), UNLIKE)
def test_calls_that_one_recording_does_not_answer(one: Any, other: Any) -> None:
    assert key(*one) != key(*other)


def test_the_flags_of_submodules_count() -> None:
    assert key(X, training=(True,)) != key(X, training=(False,))


SHAPES = st.lists(st.integers(0, 3), max_size=3)


@given(SHAPES, SHAPES, st.sampled_from([torch.float32, torch.float16, torch.int64]), st.sampled_from([torch.float32, torch.int64]))
def test_a_key_is_its_geometry(one: list[int], other: list[int], mine: torch.dtype, theirs: torch.dtype) -> None:
    alike = key(torch.zeros(one, dtype=mine)) == key(torch.ones(other, dtype=theirs))
    assert alike == ((one, mine) == (other, theirs))


@contextmanager
def _set(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def _cudnn(name: str) -> Any:
    return _set(
        lambda: getattr(torch.backends.cudnn, name),
        lambda v: setattr(torch.backends.cudnn, name, v),
        not getattr(torch.backends.cudnn, name),
    )


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast fp16": lambda: torch.autocast("cuda", torch.float16),
    "autocast bf16": lambda: torch.autocast("cuda", torch.bfloat16),
    "benchmark": lambda: _cudnn("benchmark"),
    "cudnn": lambda: _cudnn("enabled"),
    "deterministic kernels": lambda: _cudnn("deterministic"),
    "deterministic": lambda: _set(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "default dtype": lambda: _set(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "precision": lambda: _set(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "flash": lambda: _set(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "accumulation": lambda: _set(torch._C._get_cublas_allow_fp16_accumulation, torch._C._set_cublas_allow_fp16_accumulation, True),
    "efficient": lambda: _set(torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp, False),
}


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")  # there is none here
@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("mode", [m for m in MODES if not m.startswith("autocast")])
def test_a_switch_that_chooses_kernels_counts(mode: str) -> None:
    torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())  # said aloud, it is another setting than the default
    before = key(X)
    with MODES[mode]():
        assert key(X) != before
    assert key(X) == before


@pytest.mark.parametrize("mode", [m for m in MODES if m.startswith("autocast")])
def test_autocast_counts_with_its_dtype(mode: str) -> None:
    from parity.runtime.engine import engine

    with engine("emulated").entered():
        keys = {key(X)}
        with MODES[mode]():
            keys.add(key(X))
        with torch.autocast("cuda", torch.float16 if mode.endswith("bf16") else torch.bfloat16):
            keys.add(key(X))
    assert len(keys) == 3


@pytest.mark.skipif(not hasattr(torch._C, "_set_fp32_precision_setter"), reason="this torch has no wider settings")
@pytest.mark.parametrize(
    ("backend", "op"), [("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")]
)
def test_a_precision_counts_however_wide_it_is_set(backend: str, op: str) -> None:
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    for narrower in ("all", "matmul", "conv", "rnn") if op == "all" else ():
        put("cuda", narrower, "none")  # inherits, whatever was set in this process before
    with _set(lambda: get(backend, op), lambda value: put(backend, op, value), "ieee"):
        before = key(X)
        put(backend, op, "tf32")
        assert key(X) != before


def test_autocast_without_a_name_is_the_devices() -> None:
    enabled = torch.is_autocast_enabled("cuda")
    try:
        for on in (True, False):
            torch.set_autocast_enabled("cuda", on)
            assert torch.is_autocast_enabled() is on
    finally:
        torch.set_autocast_enabled("cuda", enabled)


def test_what_cannot_be_hashed_is_refused() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        key({1, 2})


def test_a_key_in_words() -> None:
    assert str(key(X, {"n": torch.zeros(1, dtype=torch.int64)})) == "[2, 3] float32, [1] int64"
    assert str(key(1)) == "no tensor"
