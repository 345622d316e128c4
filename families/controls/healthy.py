"""Look-alikes of faults that are none: a harness that refuses one of these is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parity.rows.family import Family, Input, Subject
from parity.rows.row import Settings


def builder(name: str, native: str = "") -> Callable[[Settings], Subject]:
    """Builds the class ``name`` of ``models``; ``native``: the class of ``natives`` that plays a zoo's own path."""

    def build(settings: Settings) -> Subject:
        from . import models, natives

        module = getattr(models, name)().eval()
        made: Any = None if not native else lambda: getattr(natives, native)(module)
        return Subject(module, module, native=made)

    return build


def rows_of(size: int, batch: int) -> tuple[Any, ...]:
    """One matrix of ``batch`` x ``size``."""
    return (Input((batch, size), -2.0, 2.0),)


def _healthy(name: str, model: str, other_size: int | None = None) -> Family:
    return Family("controls", name, "healthy", builder(model), rows_of, sizes=(8,), other_size=other_size, arms=("bare", "graphed"))


FAMILIES = (
    _healthy("plain", "Plain"),
    _healthy("tiny_signal_on_huge_grid", "TinySignalOnHugeGrid"),
    _healthy("nan_and_minus_zero", "NanAndMinusZero"),
    _healthy("views", "Views"),
    _healthy("nested_outputs", "NestedOutputs"),
    _healthy("dataclass_output", "DataclassOutput"),
    _healthy("lazy_device_cache", "LazyDeviceCache"),
    _healthy("cache_per_shape", "CachePerShape", other_size=12),
    _healthy("state_in_place", "StateInPlace"),
    _healthy("draws_noise", "DrawsNoise"),
    _healthy("passes_its_input_on", "PassesItsInputOn"),
    _healthy("zero_initialised_head", "ZeroInitialisedHead"),
    _healthy("integer_outputs", "IntegerOutputs"),
    _healthy("joined_side_stream", "JoinedSideStream"),
)
