"""The table itself, asked without any device: which tensors are on one is the caller's word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parity.runtime.emulated.streams import Stream
from parity.runtime.legality import CALLS, OPERATIONS, WRONG_STREAM, Violation, call_violation, device_type, violation

aten = torch.ops.aten
X, Y, HOST = torch.ones(4, 3), torch.ones(4, 3), torch.ones(4, 3)
ROWS, MASK, NUMBER = torch.tensor([0, 1]), X > 0, torch.tensor(1.0)
DEVICE = {id(t) for t in (X, Y, ROWS, MASK, NUMBER)}


def on_device(tensor: Tensor) -> bool:
    return id(tensor) in DEVICE


def cause(func: Any, *args: Any, pinned: bool = False, **kwargs: Any) -> str | None:
    found = violation(func, args, kwargs, on_device, lambda _: pinned)
    return None if found is None else found.cause


@pytest.mark.parametrize(
    ("func", "args", "expected"),
    [
        (aten._local_scalar_dense.default, (X,), "host-sync"),
        (aten._local_scalar_dense.default, (HOST,), None),
        (aten.item.default, (X,), "host-sync"),
        (aten.equal.default, (X, Y), "host-sync"),
        (aten.equal.default, (X, X), None),
        (aten.equal.default, (HOST, HOST), None),
        (aten.allclose.default, (X, X), "host-sync"),
        (aten.nonzero.default, (X,), "data-dependent-shape"),
        (aten.nonzero.default, (HOST,), None),
        (aten.bincount.default, (ROWS,), "data-dependent-shape"),
        (aten.repeat_interleave.Tensor, (ROWS,), "data-dependent-shape"),
        (aten.index.Tensor, (X, [MASK]), "data-dependent-shape"),
        (aten.index.Tensor, (X, [ROWS]), None),
        (aten.index.Tensor, (X, [None, ROWS]), None),
        (aten.index.Tensor, (X, [torch.tensor([0])]), "h2d-copy"),
        (aten.index.Tensor, (HOST, [torch.tensor([0])]), None),
        (aten.index_put_.default, (X, [MASK], torch.tensor(0.0)), None),
        (aten.index_put_.default, (X, [MASK], Y), "data-dependent-shape"),
        (aten.index_put_.default, (X, [MASK], torch.tensor(0.0), True), "data-dependent-shape"),
        (aten.index_put_.default, (X, [ROWS], Y), None),
        (aten.copy_.default, (X, HOST), "h2d-copy"),
        (aten.copy_.default, (HOST, X), "d2h-copy"),
        (aten.copy_.default, (X, Y), None),
        (aten.lift_fresh.default, (X,), "h2d-copy"),
        (aten.lift_fresh.default, (HOST,), None),
        (aten.add.Tensor, (X, Y), None),
        (aten._linalg_check_errors.default, (ROWS, "solve"), "host-sync"),
        (aten.where.self, (MASK, X, torch.tensor(0.0)), "h2d-copy"),
        (aten.where.self, (HOST > 0, HOST, torch.tensor(0.0)), None),
        (aten.masked_fill.Tensor, (X, MASK, NUMBER), "host-sync"),
        (aten.masked_fill_.Tensor, (X, MASK, torch.tensor(0.0)), None),
        (aten.masked_fill.Scalar, (X, MASK, 0.0), None),
        (aten.index_fill.int_Tensor, (X, 0, ROWS, NUMBER), "host-sync"),
        (aten.index_fill.int_Scalar, (X, 0, ROWS, 1.0), None),
        (aten.normal.Tensor_Tensor, (X, Y), "host-sync"),
        (aten.normal.float_Tensor, (0.0, Y), "host-sync"),
        (aten.normal.Tensor_float, (X, 1.0), None),
        (aten.histc.default, (X, 5), "host-sync"),
        (aten.histc.default, (X, 5, 0, 1), None),
        (aten.histc.default, (HOST, 5), None),
        (aten._linalg_eigh.default, (X,), "host-sync"),
        (aten.linalg_matrix_exp.default, (X,), "data-dependent-shape"),
        (aten.linspace.Tensor_Tensor, (NUMBER, NUMBER, 5), "host-sync"),
        (aten.linspace.default, (0, 1, 5), None),
        (aten.multinomial.default, (X, 1), None),
        (aten.multinomial.default, (X, 2, True), None),
        (aten.isin.Tensor_Tensor, (ROWS, X), "data-dependent-shape"),
        (aten.isin.Tensor_Tensor, (X, ROWS), None),
        (aten.isin.Tensor_Scalar, (X, 1), None),
        (aten.fake_quantize_per_channel_affine_cachemask.default, (X, Y, ROWS, 0, -128, 127), "host-sync"),
        (aten.fake_quantize_per_channel_affine_cachemask.default, (X, Y, NUMBER, 0, -128, 127), None),
    ],
)
def test_operations(func: Any, args: tuple[Any, ...], expected: str | None) -> None:
    assert cause(func, *args) == expected


def test_repeat_interleave_of_known_size_is_legal() -> None:
    assert cause(aten.repeat_interleave.Tensor, ROWS, output_size=2) is None


def test_what_the_caller_vouches_for_is_not_looked_at() -> None:
    assert cause(aten.isin.Tensor_Tensor, ROWS, X, assume_unique=True) is None
    assert cause(aten.segment_reduce.default, X, "sum", lengths=ROWS) == "host-sync"
    assert cause(aten.segment_reduce.default, X, "sum", lengths=ROWS, unsafe=True) is None


def test_transfers() -> None:
    to = aten._to_copy.default
    assert cause(to, HOST, device=torch.device("cuda")) == "h2d-copy"
    assert cause(to, HOST, device=torch.device("cuda"), pinned=True) == "host-sync"
    assert cause(to, HOST, device=torch.device("cuda"), non_blocking=True, pinned=True) is None
    assert cause(to, HOST, device=torch.device("cuda"), non_blocking=True) == "h2d-copy"
    assert cause(to, X, device=torch.device("cpu")) == "d2h-copy"
    assert cause(to, X, device=torch.device("cpu"), non_blocking=True) is None
    assert cause(to, X, dtype=torch.float16) is None
    assert cause(to, HOST, dtype=torch.float16) is None
    assert cause(aten.copy_.default, X, HOST, True, pinned=True) is None
    assert cause(aten.copy_.default, X, HOST, pinned=True) == "host-sync"


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (Tensor.tolist, (X,), {}, "host-sync"),
        (Tensor.tolist, (HOST,), {}, None),
        (Tensor.numpy, (X,), {}, "d2h-copy"),
        (Tensor.__repr__, (X,), {}, "host-sync"),
        (torch.tensor, ([1.0],), {"device": "cuda"}, "h2d-copy"),
        (torch.tensor, ([1.0],), {"device": 0}, "h2d-copy"),
        (torch.tensor, ([1.0],), {"device": "cpu"}, None),
        (torch.tensor, ([1.0],), {}, None),
        (torch.tensor, (X,), {"device": "cuda"}, None),
        (torch.as_tensor, (np.ones(2),), {"device": torch.device("cuda")}, "h2d-copy"),
        (torch.asarray, (), {"obj": [1.0], "device": "cuda"}, "h2d-copy"),
        (Tensor.new_tensor, (X, [1.0]), {}, "h2d-copy"),
        (Tensor.new_tensor, (HOST, [1.0]), {}, None),
        (Tensor.new_tensor, (X, [1.0]), {"device": "cpu"}, None),
        (torch.cuda.synchronize, (), {}, "host-sync"),
        (torch.cuda.Stream.synchronize, (Stream(),), {}, "host-sync"),
        (torch.add, (X, Y), {}, None),
    ],
)
def test_calls(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: str | None) -> None:
    found = call_violation(func, args, kwargs, on_device)
    assert (None if found is None else found.cause) == expected


def test_what_torch_itself_refuses_does_not_invalidate_a_capture() -> None:
    assert not Violation("h2d-copy", "x").invalidates
    assert not Violation("d2h-copy", "x").invalidates
    assert not Violation("rng", "x").invalidates
    assert Violation("host-sync", "x").invalidates
    assert str(Violation("rng", "a seed")) == "not permitted while a stream is capturing: a seed"
    assert str(Violation("host-sync", "aten::item")) == "not permitted while a stream is capturing: aten::item"
    assert "pinned" in str(Violation("h2d-copy", "Tensor.to"))


def test_device_type() -> None:
    assert [device_type(d) for d in ("cuda:1", 0, torch.device("cpu"), "meta")] == ["cuda", "cuda", "cpu", "meta"]


def test_every_name_in_the_table_exists() -> None:
    pytest.importorskip("torchvision")
    for name in (*OPERATIONS, *WRONG_STREAM):
        namespace, _, operation = name.partition("::")
        assert hasattr(getattr(torch.ops, namespace), operation), name
    assert all(callable(function) for function in CALLS)
