"""The cuda engine: the allocator's own records tell what became of an address, so that a dead read is proved without luck."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class _Raw:
    """A range of device memory as an object that ``torch.as_tensor`` can look at without owning it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def view(address: int, nbytes: int) -> Tensor:
    """``nbytes`` of device memory at ``address`` as a uint8 tensor. The memory must be mapped: see ``CudaEngine.fate``."""
    return torch.as_tensor(_Raw(address, nbytes), device="cuda")


class CudaEngine:
    """torch.cuda as it is. Needs a CUDA device; asks the allocator (``torch.cuda.memory_snapshot``) instead of guessing."""

    name = "cuda"
    certifies = True

    def entered(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def quiet(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def allocated_by(self, graphs: Iterable[Any], tensors: Iterable[Tensor]) -> list[Tensor]:
        pools = {tuple(g.pool()) for g in graphs}
        ranges = sorted(
            (int(s["address"]), int(s["address"]) + int(s["total_size"]))
            for s in torch.cuda.memory_snapshot()
            if tuple(s.get("segment_pool_id", (0, 0))) in pools
        )
        starts = [start for start, _ in ranges]
        found = []
        for tensor in tensors:
            if tensor.is_cuda and tensor.layout is torch.strided:
                address = tensor.untyped_storage().data_ptr()
                place = bisect_right(starts, address) - 1
                if place >= 0 and address < ranges[place][1]:
                    found.append(tensor)
        return found

    def _segment(self, address: int) -> dict[str, Any] | None:
        for segment in torch.cuda.memory_snapshot():
            if int(segment["address"]) <= address < int(segment["address"]) + int(segment["total_size"]):
                found: dict[str, Any] = segment
                return found
        return None

    def fate(self, address: int, nbytes: int) -> str:
        segment = self._segment(address)
        if segment is None or address + nbytes > int(segment["address"]) + int(segment["total_size"]):
            return "unmapped"
        start = int(segment["address"])
        for block in segment["blocks"]:
            end = start + int(block["size"])
            if start < address + nbytes and address < end and block["state"] != "inactive":
                return "reused"
            start = end
        return "free"

    def overwrite(self, address: int, content: Tensor) -> Tensor:
        memory = view(address, content.numel())
        before = memory.clone()
        memory.copy_(content)
        return before

    def stale(self, graphs: Iterable[Any]) -> list[str]:
        return []

    def peak_memory(self) -> int:
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
