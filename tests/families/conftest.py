"""What the tests of the zoos share. What a zoo's own code warns of while it is imported or run is not ours to fix."""

from __future__ import annotations

import importlib.util
import socket
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from families.libreyolo import ZOO as LIBREYOLO
from families.torchvision import ZOO as TORCHVISION


@pytest.fixture(scope="session")
def warmed() -> Iterator[None]:
    """All zoos imported, one thread. Skips where one is not installed."""
    for zoo in (LIBREYOLO, TORCHVISION):
        if importlib.util.find_spec(zoo.module) is None:
            pytest.skip(f"{zoo.name} is not installed: {zoo.install}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zoo.warm()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def alone(warmed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """No network, and a folder of its own to work in."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"a builder reached for the network: {args[:2]}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    return tmp_path
