"""What judging in this process needs: one thread, and a heap in which only what a row makes is looked through."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from families.controls import ZOO as CONTROLS
from parity.judge import inference
from parity.rows.discovery import Catalogue, discover
from parity.runtime.engine import engine

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """As in a child: one thread, everything imported, and the imports out of the garbage collector's sight."""
    CONTROLS.warm()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with engine("emulated").entered():  # which imports more of torch
        pass
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def controls() -> Catalogue:
    return discover([ROOT / "families"])


@pytest.fixture
def fresh(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge without a remembered reference, which a test may have spoilt."""
    monkeypatch.setattr(inference, "_MEMORY", inference._Memory(warm=True))
