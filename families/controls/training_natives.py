"""Managers of training graphs, as a zoo might have written them: a sound one, and sabotages of it."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, manager: Manager, x: Tensor, *parameters: Tensor) -> Any:
        ctx.manager = manager
        outs = manager.replay(x)
        ctx.mark_non_differentiable(*(t for t, like in zip(outs, manager.outs, strict=True) if not like.requires_grad))
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *ctx.manager.replay_backward(grads))


class Manager:
    """Sound: captures at the second call, forward and backward, outside of autocast, and hands out copies. Warm-up is undone."""

    autocast_cache = True
    warm_up_undone = True

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.calls = 0
        self.graphs: list[Any] = []
        self.outs: list[Tensor] = []
        self.single = True

    def ready(self) -> bool:
        return bool(self.graphs)

    def reason(self) -> str:
        return ""

    def __call__(self, x: Tensor) -> Any:
        self.calls += 1
        if self.graphs and self.x.shape != x.shape:
            return self.network(x)
        if not self.graphs:
            if self.calls == 1:
                return self.network(x)
            self.capture(x)
        outs = _Replay.apply(self, x, *self.parameters)
        return outs[0] if self.single else outs

    def run(self, x: Tensor) -> list[Tensor]:
        result = self.network(x)
        self.single = isinstance(result, Tensor)
        return [result] if self.single else list(result)

    def grads(self, outs: list[Tensor], incoming: list[Tensor]) -> list[Tensor | None]:
        made = [t for t in outs if t.requires_grad]
        return list(torch.autograd.grad(made, self.parameters, incoming, allow_unused=True))

    def capture(self, x: Tensor) -> None:
        gc.collect()
        self.x = x.clone()
        buffers = [(b, b.clone()) for b in self.network.buffers()]
        generator = torch.cuda.get_rng_state()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outs = self.run(self.x)
            self.grads(outs, [torch.zeros_like(t) for t in outs if t.requires_grad])
            del outs
        torch.cuda.current_stream().wait_stream(stream)
        if self.warm_up_undone:
            torch.cuda.set_rng_state(generator)
            for buffer, before in buffers:
                buffer.copy_(before)
        forward, backward = self.graph(), self.graph()
        with torch.cuda.graph(forward, stream=stream, capture_error_mode="thread_local"):
            self.outs = self.run(self.x)
        self.incoming = [torch.zeros_like(t) for t in self.outs if t.requires_grad]
        with torch.cuda.graph(backward, pool=forward.pool(), stream=stream, capture_error_mode="thread_local"):
            self.static = self.grads(self.outs, self.incoming)
        self.graphs = [forward, backward]

    def graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def replay(self, x: Tensor) -> list[Tensor]:
        self.x.copy_(x)
        self.graphs[0].replay()
        return [t.detach().clone() for t in self.outs]

    def replay_backward(self, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        given = [g for g, like in zip(grads, self.outs, strict=True) if like.requires_grad]
        for buffer, grad in zip(self.incoming, given, strict=True):
            buffer.zero_() if grad is None else buffer.copy_(grad)
        self.graphs[1].replay()
        return [None if g is None else g.clone() for g in self.static]


class RunsEagerly(Manager):
    """Claims to be ready, and only calls the network."""

    def ready(self) -> bool:
        return True

    def __call__(self, x: Tensor) -> Any:
        return self.network(x)


class DropsAGradient(Manager):
    def replay_backward(self, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        return [None, *super().replay_backward(grads)[1:]]


class SwapsParameters(Manager):
    """Two weights of one shape are told apart by their place in a list that somebody sorted."""

    def replay_backward(self, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        found = super().replay_backward(grads)
        shapes = [p.shape for p in self.parameters]
        i, j = next((i, j) for i in range(len(shapes)) for j in range(i) if shapes[i] == shapes[j])
        found[i], found[j] = found[j], found[i]
        return found


class LendsItsGradients(Manager):
    """Static gradients are handed out as they are: the second batch overwrites what the first has left, and is added to itself."""

    def replay_backward(self, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        super().replay_backward(grads)
        return [None if g is None else g.detach() for g in self.static]


class UpdatesACopy(Manager):
    """The graph writes running statistics of its own, which the module never sees again."""

    def replay(self, x: Tensor) -> list[Tensor]:
        before = [b.clone() for b in self.network.buffers()]
        found = super().replay(x)
        for buffer, value in zip(self.network.buffers(), before, strict=True):
            buffer.copy_(value)
        return found


class LeavesWarmUp(Manager):
    """BatchNorm has moved, and the generator, when the first graphed step begins."""

    warm_up_undone = False


class LeavesTheGenerator(Manager):
    """Buffers are put back after warm-up, the generator is not."""

    def capture(self, x: Tensor) -> None:
        super().capture(x)
        torch.rand(8, device=x.device)


class DrawsFromItsOwn(Manager):
    """The graphs have a generator of their own, which moves from step to step whatever the default one does."""

    def capture(self, x: Tensor) -> None:
        own = torch.Generator(device=x.device)
        own.manual_seed(7)
        self.network.generator = own  # type: ignore[assignment]
        self.own = own
        try:
            super().capture(x)
        finally:
            self.network.generator = None  # type: ignore[assignment]

    def graph(self) -> Any:
        made = super().graph()
        made.register_generator_state(self.own)
        return made


class DrawsTwice(Manager):
    """Moves the generator once more in each step than eager does."""

    def replay_backward(self, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        torch.rand(1, device=self.x.device)
        return super().replay_backward(grads)


class KeepsAnOutput(Manager):
    """The last output is copied out of the graph once."""

    kept: Tensor | None = None

    def replay(self, x: Tensor) -> list[Tensor]:
        found = super().replay(x)
        if self.kept is None:
            self.kept = found[-1].clone()
        return [*found[:-1], self.kept.clone()]


class ForgetsTheTerm(Manager):
    """What the network leaves on itself is copied when it is captured, and never again."""

    def replay(self, x: Tensor) -> list[Tensor]:
        found = super().replay(x)
        term = self.network.term
        if isinstance(term, Tensor) and not hasattr(self, "frozen"):
            self.frozen = term.clone()
        self.network.term = self.frozen.clone()  # type: ignore[assignment]
        return found


class CopiesWeights(Manager):
    """Replays on weights that it copied: right until an optimizer moves them."""

    def __init__(self, network: nn.Module) -> None:
        import copy

        super().__init__(copy.deepcopy(network))
        self.real = network

    def __call__(self, x: Tensor) -> Any:
        owned = self.parameters
        if not self.graphs:
            self.calls += 1
            if self.calls == 1:
                return self.real(x)
            self.capture(x)
        for mine, theirs in zip(self.network.buffers(), self.real.buffers(), strict=True):
            mine.copy_(theirs)
        if self.x.shape != x.shape:
            return self.real(x)
        outs = _Replay.apply(self, x, *(p for p in self.real.parameters() if p.requires_grad))
        for mine, theirs in zip(self.network.buffers(), self.real.buffers(), strict=True):
            theirs.copy_(mine)
        self.parameters = owned
        return outs[0] if self.single else outs
