"""At which sizes, batches, dtypes and shapes a safe row was compared: what a certificate can be held to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from parity.judge.outcome import Outcome
from parity.rows.family import Family, Input
from parity.rows.row import Row
from parity.rows.training import Training


def tried(outcome: Outcome, row: Row, family: Family | Training) -> list[dict[str, Any]]:
    """Every size and batch whose replay was compared. Of inference the row's own and, where ``interleave`` passed, the ones that it
    visited, with the shapes that the family declares; of training the row's own, with those that the network was given.
    """
    size, batch, dtype = row.settings.size, row.settings.batch, row.settings.dtype
    if isinstance(family, Training):
        drawn = [list(probe["shape"]) for probe in outcome.probes if probe.get("probe") == "A" and "shape" in probe]
        return [{"size": size, "batch": batch, "dtype": dtype, "shapes": drawn}]
    if family.probes is not None:  # a case file draws its own inputs: no shapes are declared
        return []
    extents = [(size, batch)]
    if any(c.name == "interleave" and c.status == "passed" for c in outcome.checks):
        if family.other_size is not None:
            extents.append((family.other_size, batch))
        if family.other_batch is not None:
            extents.append((size, family.other_batch))
    return [{"size": s, "batch": b, "dtype": dtype, "shapes": list(_shapes(family.inputs(s, b)))} for s, b in dict.fromkeys(extents)]


def _shapes(inputs: Any) -> Iterable[list[int]]:
    if isinstance(inputs, Input):
        yield list(inputs.shape)
    elif isinstance(inputs, Mapping):
        for item in inputs.values():
            yield from _shapes(item)
    elif isinstance(inputs, (tuple, list)):
        for item in inputs:
            yield from _shapes(item)
