"""Conditions hold within, and leave every setting of the process as it was, whatever it was."""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from parity.judge.counterfactual import conditions
from parity.judge.counterfactual.conditions import (
    CHILD_ENVIRONMENT,
    CONDITIONS,
    EagerTwist,
    align,
    applicable,
    applied,
    traits,
    twist,
    workspace_problem,
)
from parity.judge.counterfactual.substitutes import SUBSTITUTES
from parity.judge.outcome import CAUSES
from parity.runtime.emulated import device

NAMES = [c.name for c in CONDITIONS]
BOTH = [c.name for c in CONDITIONS if c.kind == "both"]
LEAVES = [
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
]
MODERN = hasattr(torch._C, "_get_fp32_precision_getter")
cudnn: Any = torch.backends.cudnn


def said(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return "refused"


def precisions() -> list[Any]:
    found = [said(torch.get_float32_matmul_precision), said(torch._C._get_cudnn_allow_tf32), said(torch._C._get_cublas_allow_tf32)]
    return [*found, *(torch._C._get_fp32_precision_getter(*leaf) for leaf in LEAVES if MODERN)]


def settings() -> list[Any]:
    import torch._inductor.config as inductor

    backend = torch.backends.cuda
    return [
        cudnn.deterministic, cudnn.benchmark, torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(), getattr(inductor, "deterministic", None), backend.flash_sdp_enabled(),
        backend.mem_efficient_sdp_enabled(), backend.math_sdp_enabled(), backend.cudnn_sdp_enabled(), *precisions(),
        torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state()), warnings.filters[:], dict(os.environ),
    ]  # fmt: skip


@contextlib.contextmanager
def swapped() -> Iterator[None]:
    """The opposite of torch's defaults."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_math_sdp(False)
    cudnn.benchmark = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_math_sdp(True)
        cudnn.benchmark = False


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """torch sets this together with its own flag, which may not be what it was."""
    import torch._inductor.config as inductor

    before = getattr(inductor, "deterministic", None)
    if before is not None:
        inductor.deterministic = True
    try:
        yield
    finally:
        if before is not None:
            inductor.deterministic = before


@contextlib.contextmanager
def precision(*steps: tuple[Any, ...]) -> Iterator[None]:
    """Set the newer way, by leaf, or the older one, by name; and back to torch's defaults."""
    old = {
        "matmul": torch.set_float32_matmul_precision,
        "cudnn": torch._C._set_cudnn_allow_tf32,
        "cublas": torch._C._set_cublas_allow_tf32,
    }

    def take(step: tuple[Any, ...]) -> None:
        if step[0] in old:
            old[step[0]](step[1])
        elif MODERN:
            torch._C._set_fp32_precision_setter(*step)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in steps:
            take(step)
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in [
                ("matmul", "highest"),
                ("cudnn", True),
                *((*leaf, "tf32" if leaf[1] in ("conv", "rnn") else "none") for leaf in LEAVES),
            ]:
                take(step)


STATES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "defaults": contextlib.nullcontext,
    "swapped": swapped,
    "compiled code alone deterministic": compiled,
    "matmul medium": lambda: precision(("matmul", "medium")),
    "tf32 everywhere, the older way": lambda: precision(("cublas", True), ("cudnn", True)),
    "tf32 nowhere, the older way": lambda: precision(("cublas", False), ("cudnn", False)),
    "tf32 by leaf": lambda: precision(("cuda", "matmul", "tf32")),
    "tf32 by group": lambda: precision(("generic", "all", "tf32")),
    "inherited": lambda: precision(("cuda", "all", "tf32"), ("cuda", "conv", "none")),
    "both ways": lambda: precision(("cudnn", False), ("generic", "all", "tf32"), ("cuda", "rnn", "ieee")),
}


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before = precisions()
    yield
    assert precisions() == before


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("names", [[name] for name in BOTH] + [NAMES], ids=lambda names: "+".join(names) if len(names) == 1 else "all")
def test_everything_is_as_it_was(state: str, names: list[str]) -> None:
    with STATES[state]():
        before = settings()
        with applied(names):
            if "rng-aligned" in names:
                draws()
        assert settings() == before
        with pytest.raises(KeyError), applied(names):
            raise KeyError
        assert settings() == before


@pytest.mark.parametrize("state", [s for s in STATES if s != "swapped"])
def test_inherited_precisions_stay_inherited(state: str) -> None:
    """A leaf that was set to what it inherited would no longer follow its group."""
    if not MODERN:
        pytest.skip("this torch has no such settings")
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter

    def following() -> list[str]:
        groups = [("generic", "all"), ("cuda", "all"), ("mkldnn", "all")]
        kept = []
        for group in groups:
            kept.append(get(*group))
            put(*group, "none")
        put("generic", "all", "ieee")
        found = [get(*leaf) for leaf in LEAVES]
        for group, value in zip(groups, kept, strict=True):
            put(*group, value)
        return found

    with STATES[state]():
        before = following()
        with applied(["tf32-off"]):
            pass
        assert following() == before


@pytest.mark.parametrize("state", STATES)
def test_without_tf32_nothing_uses_it_and_readers_of_either_way_get_an_answer(state: str) -> None:
    with STATES[state]():
        readable = "refused" not in precisions()[:3]
        with applied(["tf32-off"]):
            if readable:
                assert torch.backends.cuda.matmul.allow_tf32 is False
                assert cudnn.allow_tf32 is False
                assert torch.get_float32_matmul_precision() == "highest"
            if MODERN:
                assert [torch._C._get_fp32_precision_getter(*leaf) for leaf in LEAVES if leaf[1] != "all"] == ["ieee"] * 4


def test_the_other_settings_hold_within() -> None:
    with applied(["cudnn-deterministic"]):
        assert (cudnn.deterministic, cudnn.benchmark) == (True, False)
    with applied(["deterministic-algorithms"]):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        warnings.warn("x_cuda does not have a deterministic implementation", UserWarning, stacklevel=1)
    with applied(["math-sdpa"]):
        backend = torch.backends.cuda
        assert backend.math_sdp_enabled()
        assert not any([backend.flash_sdp_enabled(), backend.mem_efficient_sdp_enabled(), backend.cudnn_sdp_enabled()])


@pytest.mark.parametrize("substitute", SUBSTITUTES, ids=lambda s: s.name)
def test_substitutes_hold_within(substitute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[list[str]] = []

    @contextlib.contextmanager
    def fake(names: Any) -> Iterator[None]:
        entered.append(list(names))
        yield

    monkeypatch.setattr(conditions, "substituted", fake)
    with applied(["substitute:" + substitute.name, "tf32-off"]):
        assert entered == [[substitute.name]]


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def test_aligned_generators_start_from_one_state() -> None:
    found = []
    for _ in range(2):
        draws()
        with applied(["rng-aligned"]):
            first = draws()
            align()
            found += [first, draws()]
    assert len(set(found)) == 1
    with applied(["deterministic-algorithms"]):
        assert draws() != found[0]


def test_the_generator_of_a_device_is_aligned_too_and_put_back() -> None:
    with device():
        generator = torch.cuda.default_generators[0]
        torch.rand(3, device="cuda")
        before = generator.get_state()
        with applied(["rng-aligned"]):
            one = torch.rand(3, device="cuda").cpu()
        assert bool((generator.get_state() == before).all())
        torch.rand(3, device="cuda")
        with applied(["rng-aligned"]):
            assert torch.rand(3, device="cuda").cpu().tolist() == one.tolist()


def test_a_setting_that_cannot_be_entered_undoes_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings()

    def broken(names: Any) -> Any:
        raise OSError("no")

    monkeypatch.setattr(conditions, "substituted", broken)
    with pytest.raises(OSError, match="no"), applied(NAMES):
        pass
    assert settings() == before


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="no condition is called tf33-off: rng-aligned, "), applied(["tf32-off", "tf33-off"]):
        pass
    with pytest.raises(ValueError, match="no condition is called tf33-off: rng-aligned, "):
        twist(["tf33-off"])


# ---- the eager arm's twists, and what can matter


def test_twists_are_the_eager_arms_own() -> None:
    assert twist(BOTH) == EagerTwist(True, False, False)
    assert twist(["autocast-cache-off"]) == EagerTwist(autocast_cache=False)
    assert twist(["backward-inside-autocast"]) == EagerTwist(backward_inside_autocast=True)
    assert twist(["incoming-layout-of-outputs"]) == EagerTwist(incoming_layout=True)


@given(st.sets(st.sampled_from(NAMES)))
def test_each_eager_condition_changes_one_field(names: set[str]) -> None:
    changed = sum(a != b for a, b in zip(vars(twist(names)).values(), vars(EagerTwist()).values(), strict=True))
    assert changed == sum(c.kind == "eager" for c in CONDITIONS if c.name in names)


def test_the_table_is_ordered_and_its_words_are_known() -> None:
    assert [c.cost for c in CONDITIONS] == sorted({c.cost for c in CONDITIONS})
    assert len(set(NAMES)) == len(NAMES)
    assert {c.cause for c in CONDITIONS} <= set(CAUSES)
    assert {c.kind for c in CONDITIONS} == {"both", "eager"}
    assert {n.removeprefix("substitute:") for n in NAMES if n.startswith("substitute:")} == {s.name for s in SUBSTITUTES}


def test_what_cannot_matter_is_left_out() -> None:
    bare = {c.name for c in applicable(traits(autocast=False, random=False, cuda=False, remedies=[]))}
    assert bare == {"incoming-layout-of-outputs", "deterministic-algorithms"}
    everything = traits(autocast=True, random=True, cuda=True, remedies=[n for n in NAMES if n in BOTH])
    assert applicable(everything) == CONDITIONS
    one = applicable(traits(autocast=False, random=False, cuda=True, remedies=["substitute:grid_sample", "math-sdpa"]))
    assert {"substitute:grid_sample", "math-sdpa", "tf32-off"} < {c.name for c in one}
    assert not {c.name for c in one} & {"substitute:interpolate", "autocast-cache-off", "backward-inside-autocast", "rng-aligned"}


# ---- cuBLAS


def test_the_environment_of_a_child_leaves_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CHILD_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    if not torch.cuda.is_available():
        assert workspace_problem() == ""
    monkeypatch.setattr(torch, "mm", lambda *args: warnings.warn("set CUBLAS_WORKSPACE_CONFIG=:4096:8", UserWarning, stacklevel=1))
    assert (
        workspace_problem()
        == "CUBLAS_WORKSPACE_CONFIG was set after torch had read it: it must be in the environment before CUDA starts"
    )


@pytest.mark.parametrize("value", [None, ":0:0"])
def test_a_missing_or_other_workspace_is_a_problem(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
    assert workspace_problem() == f"CUBLAS_WORKSPACE_CONFIG={value or ''!r} is none of :4096:8, :16:8"


def test_settings_can_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above would notice a condition that leaves something behind."""
    for name, leave in {
        "cudnn-deterministic": lambda: setattr(cudnn, "benchmark", not cudnn.benchmark),
        "rng-aligned": lambda: F.dropout(torch.ones(2)),
        "tf32-off": lambda: torch.set_float32_matmul_precision("high"),
    }.items():

        @contextlib.contextmanager
        def leaky(leave: Callable[[], Any] = leave) -> Iterator[None]:
            yield
            leave()

        monkeypatch.setattr(conditions, "_SETTINGS", {**conditions._SETTINGS, name: leaky})
        before = settings()
        with applied([name]):
            pass
        assert settings() != before
        cudnn.benchmark = False
        with precision():
            pass
