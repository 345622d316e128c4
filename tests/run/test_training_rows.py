"""Training rows in real children, through the judge of all modes."""

import os
from pathlib import Path

import pytest

from parity.judge.outcome import Outcome
from parity.judge.verdict import verdict_of
from parity.rows.discovery import discover
from parity.rows.row import Row, Settings
from parity.run.isolate import Options, Pool

FAMILIES = str(Path(__file__).parents[2] / "families")


def environment(row, catalogue, engine, seed):
    """A judge that only tells what a training row needs of its child."""
    assert catalogue.declaration(row).mode == "training"
    return Outcome(row.id, "judged", notes=(os.environ.get("CUBLAS_WORKSPACE_CONFIG", "not set"),))


def rows(*names):
    every = [row for family in discover([FAMILIES]).zoo("controls").families for row in family.rows()]
    return [[row for row in every if row.family == name] for name in names]


def test_the_default_judge_takes_rows_of_both_modes(folder):
    groups = rows("plain", "trains_plainly", "drops_a_gradient")
    with Pool(Options("emulated", (FAMILIES,), slots=1)) as pool:
        found = {outcome.row: verdict_of(outcome, "emulated").verdict for outcome in pool.run(groups)}
    named = {Row.parse(row).family: verdict for row, verdict in found.items()}
    assert named == {"plain": "screened", "trains_plainly": "screened", "drops_a_gradient": "wrong"}
    assert len(found) == 5


@pytest.mark.parametrize("own", ["", ":16:8"])
def test_cublas_is_told_before_cuda_starts_and_a_users_own_setting_stays(folder, monkeypatch, own):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if own:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", own)
    row = Row("controls", "trains_plainly", "training", "training", Settings(0, 6), "bare")
    with Pool(Options("emulated", (FAMILIES,), slots=1, judge=f"{__name__}:environment")) as pool:
        (outcome,) = pool.run([[row]])
    assert outcome.notes == (own or ":4096:8",)
