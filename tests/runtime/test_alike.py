"""One look at an argument instead of its key: it claims no more than the key would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from parity.runtime.signature import alike, quick

pytestmark = pytest.mark.skipif(alike(torch.zeros(1)) is None, reason="this torch has no guards of tensors")

SHAPE = (2, 3, 4)
OTHERS: dict[str, Callable[[], Any]] = {
    "the same": lambda: torch.ones(SHAPE),
    "a view of the same geometry": lambda: torch.ones(4, 3, 4)[2:],
    "a larger one": lambda: torch.ones(3, 3, 4),
    "one more dimension": lambda: torch.ones(1, *SHAPE),
    "other strides": lambda: torch.ones(4, 3, 2).permute(2, 1, 0),
    "gaps": lambda: torch.ones(2, 3, 8)[..., ::2],
    "another type": lambda: torch.ones(SHAPE, dtype=torch.float64),
    "unaligned": lambda: torch.ones(25)[1:].view(SHAPE),
    "with a gradient": lambda: torch.ones(SHAPE, requires_grad=True),
    "a parameter": lambda: nn.Parameter(torch.ones(SHAPE)),
    "negative": lambda: torch._neg_view(torch.ones(SHAPE)),
    "conjugate": lambda: torch.ones(SHAPE, dtype=torch.complex64).conj(),
    "complex": lambda: torch.ones(SHAPE, dtype=torch.complex64),
    "sparse": lambda: torch.ones(SHAPE).to_sparse(),
    "expanded": lambda: torch.ones(1, 3, 4).expand(SHAPE),
    "empty": lambda: torch.ones(0, 3, 4),
    "meta": lambda: torch.ones(SHAPE, device="meta"),
    "a number": lambda: 3,
    "nothing": lambda: None,
    "a list": lambda: [torch.ones(SHAPE)],
}


def claims(one: Tensor, other: Any) -> bool:
    fits = alike(one)
    assert fits is not None
    return fits(other)


@pytest.mark.parametrize("grads", [True, False])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("one", ["the same", "other strides", "unaligned", "with a gradient", "conjugate", "expanded", "empty"])
def test_a_claim_is_the_keys(one: str, other: str, grads: bool) -> None:
    with torch.set_grad_enabled(grads):
        mine, theirs = OTHERS[one](), OTHERS[other]()
        equal = quick((theirs,), ()) is not None and quick((mine,), ()) == quick((theirs,), ())
        assert claims(mine, theirs) == equal


@contextmanager
def _autocast() -> Iterator[None]:
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


MODES: dict[str, Callable[[], Any]] = {
    "grad": lambda: torch.no_grad(),
    "inference": lambda: torch.inference_mode(),
    "autocast": lambda: _autocast(),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True),
    "no cudnn": lambda: torch.backends.cudnn.flags(enabled=False),
    "deterministic cudnn": lambda: torch.backends.cudnn.flags(enabled=True, deterministic=True),
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "flash": lambda: switched("_set_sdp_use_flash", "_get_flash_sdp_enabled"),
    "efficient": lambda: switched("_set_sdp_use_mem_efficient", "_get_mem_efficient_sdp_enabled"),
    "math": lambda: switched("_set_sdp_use_math", "_get_math_sdp_enabled"),
    "cudnn attention": lambda: switched("_set_sdp_use_cudnn", "_get_cudnn_sdp_enabled"),
    "math reduction": lambda: switched("_set_math_sdp_allow_fp16_bf16_reduction", "_get_math_sdp_allow_fp16_bf16_reduction"),
    "float16 reduction": lambda: assigned(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    "bfloat16 reduction": lambda: assigned(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    "fills": lambda: switched("_set_deterministic_fill_uninitialized_memory", "_get_deterministic_fill_uninitialized_memory"),
    "deterministic": lambda: deterministic(),
    "default type": lambda: default(torch.float64),
    "products in TF32": lambda: precision("matmul"),
    "convolutions in TF32": lambda: precision("conv"),
    "recurrent layers in TF32": lambda: precision("rnn"),
}


@contextmanager
def switched(setter: str, getter: str) -> Iterator[None]:
    before = getattr(torch._C, getter)()
    getattr(torch._C, setter)(not before)
    try:
        yield
    finally:
        getattr(torch._C, setter)(before)


@contextmanager
def assigned(owner: Any, name: str) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, not before)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def precision(op: str) -> Iterator[None]:
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        pytest.skip("this torch has the older settings only")
    before = torch._C._get_fp32_precision_getter("cuda", op)
    torch._C._set_fp32_precision_setter("cuda", op, "ieee" if before == "tf32" else "tf32")
    try:
        yield
    finally:
        torch._C._set_fp32_precision_setter("cuda", op, before)


@pytest.mark.parametrize("mode", MODES)
def test_every_global_switch_counts(mode: str) -> None:
    x = torch.ones(SHAPE)
    fits = alike(x)
    assert fits is not None
    assert fits(x)
    key = quick((x,), ())
    with MODES[mode]():
        assert quick((x,), ()) != key
        assert not fits(x)
    assert quick((x,), ()) == key
    assert fits(x)


@given(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), max_size=4))
def test_sizes_are_told_apart(one: list[int], other: list[int]) -> None:
    assert claims(torch.zeros(one), torch.zeros(other)) == (one == other)
