"""Eager and one arm of a row side by side, each as a call without arguments, for whoever measures them. Judges nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from parity.judge.arms import BareArm
from parity.judge.subject import Bench
from parity.judge.train import arms as train_arms
from parity.judge.train.step import TrainBench, mixed
from parity.rows.discovery import Catalogue
from parity.rows.family import Family, Subject
from parity.rows.row import Row
from parity.rows.training import Training, TrainSubject
from parity.runtime import tree
from parity.runtime.engine import DEVICE, Engine
from parity.runtime.engine import engine as engine_of
from parity.runtime.errors import CaptureRefused
from parity.runtime.fresh import Outputs
from parity.runtime.invalidation import scope
from parity.runtime.refusal import explain
from parity.runtime.runner import GraphRunner

AUTOCAST = "autocast_"
"""In front of a dtype in the settings of an inference row: weights as they are, the forward within autocast."""


class NotCaptured(Exception):
    """The arm does not capture. ``cause``, ``where``: as of a refusal."""

    def __init__(self, message: str, cause: str, where: str) -> None:
        super().__init__(message)
        self.cause, self.where = cause, where


@dataclass
class Contest:
    """``arm`` captures when it has warmed up. ``check()`` raises where it runs eagerly instead. ``network``: forward and
    backward of what is captured, eagerly, with gradients of the shapes that the loss gave; None for inference. ``shapes``, ``dtype``:
    of what is captured, as certificates know them."""

    eager: Callable[[], Any]
    arm: Callable[[], Any]
    check: Callable[[], None]
    network: Callable[[], Any] | None
    shapes: tuple[tuple[int, ...], ...]
    dtype: str


@contextlib.contextmanager
def contest(row: Row, catalogue: Catalogue, engine: str, seed: int = 0) -> Iterator[Contest]:
    """Both ways on one freshly built model. Within it the engine is entered. Raises BrokenRow, and NotCaptured for any refusal."""
    driver = engine_of(engine)
    family = catalogue.declaration(row)
    try:
        with driver.entered():
            if isinstance(family, Training):
                bench = TrainBench(row, family, driver, seed)
                with bench.around():
                    yield _training(bench, bench.build())
            else:
                with torch.no_grad(), family.context(DEVICE) if family.context is not None else contextlib.nullcontext():
                    yield _inference(row, family, driver, seed)
    except CaptureRefused as refusal:
        raise NotCaptured(refusal.message, refusal.cause, refusal.where) from refusal


# ---------------------------------------------------------------- inference
def _inference(row: Row, family: Family, driver: Engine, seed: int) -> Contest:
    wanted = row.settings.dtype
    auto = getattr(torch, wanted.removeprefix(AUTOCAST)) if wanted.startswith(AUTOCAST) else None
    bench = Bench(replace(row, settings=replace(row.settings, dtype=family.dtype)), family, driver, seed)
    subject, args = bench.build(), bench.args("A")
    if auto is None and wanted != family.dtype:
        dtype: torch.dtype = getattr(torch, wanted)
        subject.module.to(dtype)
        leaves, spec = tree.flatten(args)
        args = tree.unflatten([x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves], spec)
    arm, check = _arm(row.arm, subject)

    def calling(forward: Callable[..., Any]) -> Callable[[], Any]:
        """As a predict() has it: a scope and an autocast of its own per call."""

        def call() -> Any:
            with scope(), torch.autocast("cuda", auto) if auto is not None else contextlib.nullcontext():
                return forward(*args)

        return call

    tensors = [x for x in tree.flatten(args)[0] if isinstance(x, Tensor)]
    own = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    shapes = tuple(tuple(t.shape) for t in tensors)
    eager = subject.compose(subject.region)
    return Contest(calling(eager), calling(arm), check, None, shapes, str(own).removeprefix("torch."))


def _arm(name: str, subject: Subject) -> tuple[Callable[..., Any], Callable[[], None]]:
    if name == "graphed":
        runner = GraphRunner(subject.region, subject.module)

        def check() -> None:
            for refusal in runner.refusals():
                raise refusal
            if not runner.info().replays or runner.info().eager:
                raise CaptureRefused("unknown", "; ".join(runner.info().eager) or "nothing was captured")

        return subject.compose(runner), check
    if name == "native" and subject.native is not None:
        own = subject.native()

        def native(*args: Any) -> Any:
            try:
                return own(*args)
            except Exception as error:
                raise explain(error, None) from error

        return native, lambda: None
    if name == "bare":
        return BareArm(subject), lambda: None
    raise ValueError(f"arm {name!r} cannot be measured against eager here")


# ---------------------------------------------------------------- training
def _training(bench: TrainBench, subject: TrainSubject) -> Contest:
    batch = bench.args("A")
    arm = train_arms.ARMS[bench.row.arm](subject)
    params = [p for p in subject.module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-5, fused=bench.engine.certifies)
    scaler = torch.amp.GradScaler("cuda", enabled=bench.dtype == torch.float16)

    def stepping(network: Callable[..., Any], cache: bool) -> Callable[[], Any]:
        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with mixed(bench.dtype, cache):
                loss = subject.loss(network, *batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return step

    def check() -> None:
        if (refusal := arm.refusal()) is not None:
            raise refusal

    seen = _Seen(subject.network)
    stepping(seen, True)()

    def network() -> None:
        optimizer.zero_grad(set_to_none=True)
        with mixed(bench.dtype, True):
            made = seen.again()
        pairs = [(t, g) for t, g in zip(made, seen.grads, strict=True) if g is not None]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

    shapes = tuple(tuple(x.shape) for x in seen.leaves() if isinstance(x, Tensor))
    return Contest(stepping(subject.network, True), stepping(arm, arm.cache), check, network, shapes, bench.row.settings.dtype)


class _Seen:
    """The network within one step: what it was given, and the gradients that came back."""

    def __init__(self, network: Callable[..., Any]) -> None:
        self._network = network
        self._given: tuple[Any, Any] = ((), {})
        self.grads: list[Tensor | None] = []

    def leaves(self) -> list[Any]:
        return tree.flatten(self._given)[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._given = args, kwargs
        result = self._network(*args, **kwargs)
        made = self._differentiable(result)
        self.grads = [None] * len(made)
        for i, tensor in enumerate(made):
            tensor.register_hook(lambda grad, i=i: self.grads.__setitem__(i, grad.detach().clone()))
        return result

    def again(self) -> list[Tensor]:
        args, kwargs = self._given
        return self._differentiable(self._network(*args, **kwargs))

    def _differentiable(self, result: Any) -> list[Tensor]:
        outputs = Outputs.of(result, self.leaves())
        return [outputs.tensors[i] for i in outputs.differentiable()]
