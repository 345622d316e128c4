"""Markdown from texts: tables and code that no cell can break."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pandas as pd
from tabulate import tabulate


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """A GitHub table of texts; pipes and line ends in cells are escaped. Empty for no rows."""
    if not rows:
        return ""
    frame = pd.DataFrame([{name: _cell(value) for name, value in row.items()} for row in rows], dtype=object).fillna("")
    return tabulate(frame.to_numpy().tolist(), list(frame.columns), tablefmt="github", disable_numparse=True)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def code(text: str) -> str:
    """Text as Markdown code, whatever backticks it holds."""
    if not text:
        return ""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"
