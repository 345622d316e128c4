"""What docs/zoo.md tells a maintainer to type works: its training is judged, its base class obeys its own allowlist."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

from parity.cli import app
from parity.judge.training import judge
from parity.judge.verdict import verdict_of
from parity.rows.discovery import Selection, discover
from parity.runtime import NotCertified
from parity.runtime.allowlist import FILE, SCHEMA, Certificate, Tried, checksum
from parity.runtime.emulated import device

PAGE = (Path(__file__).parents[1] / "docs" / "zoo.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def block(head: str) -> str:
    (text,) = [text for _, text in BLOCKS if text.startswith(head)]
    return str(text)


def test_its_training_is_found_and_judged(tmp_path: Path) -> None:
    (tmp_path / "families_of_page").mkdir()
    (tmp_path / "families_of_page" / "mine.py").write_text(block("# families/mine.py"))
    catalogue = discover([tmp_path / "families_of_page"])
    rows = catalogue.select(Selection(zoos=("mine",), dtypes=("float32",)))
    assert [row.id for row in rows] == ["mine/tiny/classify/training/32px-b2-float32/graphed"]
    found = verdict_of(judge(rows[0], catalogue, "emulated"), "emulated")
    assert (found.verdict, found.cause) == ("screened", ""), found


def test_its_base_class_obeys_the_allowlist_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(block("# mine/base.py"))
    with device(), torch.inference_mode():
        made: Any = runpy.run_path(str(tmp_path / "base.py"))["BaseModel"]()
        made.model = torch.nn.Linear(4, 4).eval().to("cuda")
        x = torch.rand(2, 4, device="cuda")
        for listed in ((), (made,)):
            told = [
                Certificate(
                    "mine", "tiny", "classify", "inference", "here", one._environment(), (Tried(0, 2, "float32", ((2, 4),)),)
                ).to_dict()
                for one in listed
            ]
            body = json.loads(json.dumps({"schema": SCHEMA, "environments": ["here"], "certificates": told}))
            (tmp_path / FILE).write_text(json.dumps(body | {"checksum": checksum(body)}))
            if not listed:
                with pytest.raises(NotCertified, match="parity certify --zoo mine --family tiny"):
                    made.predict(x, cuda_graph=True)
                made.cuda_graph_allowlist = moved = tmp_path / "new" / FILE  # what was read is kept per path
                moved.parent.mkdir()
                tmp_path = moved.parent
        first, second = made.predict(x, cuda_graph=True), made.predict(x, cuda_graph=True)
        assert torch.equal(first, made.model(x))
        assert torch.equal(second, first)
        assert made.graph_info()["pieces"][""]["captures"] == 1


def test_its_commands_and_options_exist() -> None:
    fenced = [line.partition("#")[0] for name, text in BLOCKS if not name for line in text.splitlines()]
    inline = [text.replace("\n", " ") for text in re.findall(r"`(parity [^`]+)`", PAGE)]
    known = get_command(app).commands  # type: ignore[attr-defined]
    told = [shlex.split(text) for text in fenced + inline if text.startswith("parity ")]
    assert len(told) >= 6
    for words in told:
        options = {opt for parameter in known[words[1]].params for opt in (*parameter.opts, *parameter.secondary_opts)}
        assert {w for w in words[2:] if w.startswith("--")} <= options, words
