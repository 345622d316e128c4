"""Any order of calls, changes, releases and failures, on the emulated engine: always eager's bits, always eager's streams."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor, nn

from parity.runtime import GraphRunner, record, rng
from parity.runtime.buffers import Outlet
from parity.runtime.emulated import device
from parity.runtime.invalidation import Watch, scope
from parity.runtime.state import same_bits

CAP = 2
FULL = 100
TOTAL: Counter[str] = Counter()
logging.getLogger("parity.runtime").addHandler(logging.NullHandler())


class Subject(nn.Module):
    """Weights, a buffer kept in place in training mode, noise from two generators, a one-entry cache, and a tensor derived from
    weights that its owner renews when told."""

    def __init__(self, derives: bool) -> None:
        super().__init__()
        self.derives = derives
        self.first = nn.Linear(4, 4)
        self.middle: nn.Module = nn.ReLU()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(4))
        self.own = torch.Generator("cuda")
        self.cache: tuple[int, Tensor] | None = None
        self.table: Tensor | None = None
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("injected")
        if not self.derives:
            return self.rest(self.middle(self.first(x.to(self.first.weight.dtype))))
        if self.cache is None or self.cache[0] != x.shape[0]:
            self.cache = (x.shape[0], torch.arange(x.shape[0], device="cuda").reshape(-1, 1) * 0.5)
        if self.table is None:
            self.table = self.first.weight.detach().sum(0)
        x = (x + self.cache[1]).to(self.first.weight.dtype)
        return self.rest(self.middle(self.first(x)) + self.table)

    def rest(self, y: Tensor) -> Tensor:
        y = self.drop(y)
        if self.training:
            self.steps.add_(1)
            y = y + self.steps + torch.rand(4, device="cuda", generator=self.own)
        return y


class Machine(RuleBasedStateMachine):
    """Two copies of one module: one behind a runner, one eager. Every rule does the same to both."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.stack.enter_context(device())
        self.stack.enter_context(torch.no_grad())
        self.scopes: list[ExitStack] = []

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            info = self.runner.info()
            TOTAL.update(captures=info.captures, replays=info.replays, drops=info.dropped.total(), eager=info.eager.total())
            TOTAL.update({reason.partition(":")[0]: count for reason, count in info.eager.items()})
        while self.scopes:
            self.scopes.pop().close()
        self.stack.close()

    @initialize(derives=st.booleans())
    def build(self, derives: bool) -> None:
        self.modules = []
        for _ in range(2):
            torch.manual_seed(0)
            module = Subject(derives).to("cuda").eval()
            module.own.manual_seed(1)
            self.modules.append(module)
        self.graphed, self.plain = self.modules
        self.runner = GraphRunner(self.graphed, max_graphs=CAP)
        self.seed = 0
        self.last = 1, "plain", False
        self.held: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()

    # ------------------------------------------------------------ calls
    @rule(
        rows=st.integers(1, 3),
        layout=st.sampled_from(["plain", "strided", "expanded", "half"]),
        times=st.integers(1, 3),
        inference=st.booleans(),
    )
    def call(self, rows: int, layout: str, times: int, inference: bool) -> None:
        self.last = rows, layout, inference
        for _ in range(times):
            self.seed += 1
            x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(self.seed)).to("cuda")
            narrow = x[:, :4].clone()
            kinds = {"plain": narrow, "strided": x[:, ::2], "expanded": narrow[:1].expand(rows, 4), "half": narrow.bfloat16()}
            x = kinds[layout]
            given = x.clone()
            results, states = [], []
            for run in (self.runner, self.plain):
                torch.manual_seed(self.seed)
                with torch.inference_mode() if inference else nullcontext():
                    results.append(run(x))
                states.append(torch.cuda.default_generators[0].get_state().tolist())
            assert same_bits(*results), (rows, layout, self.runner.info())
            assert states[0] == states[1]
            assert torch.equal(x, given)
        self.held[self.seed] = (results[0], results[0].clone())

    # ------------------------------------------------------------ changes
    @rule(training=st.booleans(), part=st.sampled_from(["", "drop"]))
    def mode(self, training: bool, part: str) -> None:
        for module in self.modules:
            module.get_submodule(part).train(training)

    @rule(by=st.sampled_from([0.5, 2.0, -1.0]), told=st.booleans())
    def update_in_place(self, by: float, told: bool) -> None:
        for module in self.modules:
            (module.first.weight.mul_ if told else module.first.weight.data.mul_)(by)
            module.table = None  # the owner learnt of it
        self.call(self.last[0], self.last[1], 1, self.last[2])

    @rule(how=st.sampled_from(["data", "parameter", "layer", "middle", "buffer", "type", "trip", "assign", "load", "step"]))
    def change(self, how: str) -> None:
        self.seed += 1
        while self.scopes and how == "data":  # what only the full check can see: seen at the next scope
            self.scopes.pop().close()
        for module in self.modules:
            draw = torch.randn(4, 4, generator=torch.Generator().manual_seed(self.seed)).to("cuda", module.first.weight.dtype)
            if how == "data":
                module.first.weight.data = draw
            elif how == "parameter":
                module.first.weight = nn.Parameter(draw)
            elif how == "layer":
                torch.manual_seed(self.seed)
                module.first = nn.Linear(4, 4).to("cuda", draw.dtype)
            elif how == "middle":
                module.middle = nn.Tanh() if isinstance(module.middle, nn.ReLU) else nn.ReLU()
            elif how == "buffer":
                module.steps = torch.full((4,), float(self.seed), device="cuda")
            elif how == "type":
                module.to(torch.bfloat16 if draw.dtype is torch.float32 else torch.float32)
            elif how == "trip":
                module.to("cpu").to("cuda")
            elif how in ("assign", "load"):
                state = {k: v + 1 for k, v in module.state_dict().items()}
                module.load_state_dict(state, assign=how == "assign")
            else:
                for p in module.parameters():
                    p.grad = torch.ones_like(p)
                torch.optim.SGD(module.parameters(), lr=0.5).step()
            module.table = None
        self.call(self.last[0], self.last[1], 1, self.last[2])

    # ------------------------------------------------------------ the runner
    @rule()
    def release(self) -> None:
        self.runner.release()

    @rule()
    def invalidate(self) -> None:
        self.runner.invalidate("told")

    @rule()
    def toggle_failure(self) -> None:
        self.graphed.fails = not self.graphed.fails
        if not self.graphed.fails:
            self.runner.release()  # a refusal is remembered until then

    @precondition(lambda self: len(self.scopes) < 2)
    @rule(after=st.sampled_from([1, 3]))
    def enter(self, after: int) -> None:
        inner = ExitStack()
        inner.enter_context(scope(after))
        self.scopes.append(inner)

    @precondition(lambda self: self.scopes)
    @rule()
    def leave(self) -> None:
        self.scopes.pop().close()

    # ------------------------------------------------------------ always
    @invariant()
    def results_handed_out_stay(self) -> None:
        for result, copy in getattr(self, "held", {}).values():
            assert same_bits(result, copy)
        while len(getattr(self, "held", {})) > 5:
            self.held.popitem(last=False)

    @invariant()
    def state_is_eagers(self) -> None:
        if not hasattr(self, "graphed"):
            return
        assert same_bits(self.graphed.steps, self.plain.steps)
        assert self.graphed.own.get_state().tolist() == self.plain.own.get_state().tolist()
        assert len(self.runner.entries()) <= CAP


def explore(examples: int) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
            phases=[Phase.generate] if examples < FULL else [Phase.generate, Phase.shrink],
        ),
    )


def test_any_order_equals_eager() -> None:
    TOTAL.clear()
    explore(FULL - 1)
    replaced, capped = "a tensor that the graph reads was replaced", f"more than {CAP} signatures"
    for word in ("captures", "replays", "drops", "refused", replaced, capped):
        assert TOTAL[word] > 0, (word, TOTAL)


@pytest.mark.parametrize(
    ("owner", "name", "blind"),
    [
        (Watch, "look", lambda self: ""),
        (record.Entry, "doubtful", lambda self: False),
        (rng, "restore", lambda streams: None),
        (record, "kept", lambda module: nullcontext()),
        (Outlet, "hand_out", lambda self, leaves, fresh: self.leaves[0]),
    ],
    ids=["look", "doubt", "streams", "kept", "clones"],
)
def test_it_finds_what_a_blinded_runtime_gets_wrong(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, blind: Any) -> None:
    monkeypatch.setattr(owner, name, blind)
    with pytest.raises(AssertionError):
        explore(FULL - 1)
