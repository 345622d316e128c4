"""``package.module:factory`` as a case: imports and calls the factory in the child, draws its inputs, says by name what is missing."""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn

INTEGERS = 8
"""Integer inputs are drawn from 0 to 7: small enough for the index tables of most models."""


class TargetError(Exception):
    """The target cannot be used as it is. The message says what is missing, with an example of the right form."""


def build_from(target: str) -> nn.Module:
    """The module that ``package.module:factory`` returns: a function without required arguments, or a class of modules."""
    name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise TargetError(
                f"{target}: there is no module {error.name!r} on the path (the current folder included); the right form is "
                "package.module:factory, such as torchvision.models:resnet18"
            ) from error
        raise TargetError(f"{target}: importing {name} needs {error.name!r}, which is not installed") from error
    except Exception as error:
        raise TargetError(f"{target}: importing {name} raised {type(error).__name__}: {error}") from error
    factory = module
    for step in attribute.split("."):
        if not hasattr(factory, step):
            names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            near = difflib.get_close_matches(step, names, n=8, cutoff=0.4) or names[:8]
            raise TargetError(f"{target}: {name} has no {attribute!r}; it has: {', '.join(near) or 'nothing that can be called'}")
        factory = getattr(factory, step)
    made = factory if isinstance(factory, nn.Module) else _called(factory, target)
    if not isinstance(made, nn.Module):
        raise TargetError(f"{target}: it returned a {type(made).__name__}; a factory returns a torch.nn.Module")
    return made


def _called(factory: Any, target: str) -> Any:
    if not callable(factory):
        raise TargetError(f"{target}: a {type(factory).__name__} cannot be called; name a function that returns a torch.nn.Module")
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # built in
        parameters = []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if needed := [p.name for p in parameters if p.default is p.empty and p.kind not in variable]:
        name = target.partition(":")[2].rpartition(".")[2]
        given = ", ".join(f"{n}=..." for n in needed)
        raise TargetError(
            f"{target}: it needs {', '.join(needed)}; name a function without required arguments, such as\n"
            f"    def make():\n        return {name}({given})"
        )
    return factory()


def probes_from(inputs: list[str], device: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Arguments A and B for ``shape[:dtype]`` each, such as ``1x3x224x224`` or ``1x16:int64``: uniform in [0, 1) and normal 3x + 2."""
    generator = torch.Generator().manual_seed(0)
    drawn: tuple[list[Tensor], list[Tensor]] = ([], [])
    for text in inputs:
        sizes, _, name = text.partition(":")
        dtype = getattr(torch, name or "float32", None)
        if not isinstance(dtype, torch.dtype):
            raise TargetError(f"--input {text}: torch has no dtype {name!r}; the right form is 1x16:int64")
        shape = [int(size) for size in sizes.split("x")] if sizes else []
        for number, values in enumerate(drawn):
            if dtype.is_floating_point or dtype.is_complex:
                value = torch.rand(shape, generator=generator) if number == 0 else torch.randn(shape, generator=generator) * 3 + 2
            else:
                value = torch.randint(0, 2 if dtype == torch.bool else INTEGERS, shape, generator=generator)
            values.append(value.to(dtype).to(device))
    return tuple(drawn[0]), tuple(drawn[1])
