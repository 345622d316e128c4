"""The matrix: one test per row, its id the row's. ``pytest parity/ -k yolox``; a zoo's own tests import ``test_row``."""

from __future__ import annotations

from parity.plugin import Matrix, judge
from parity.rows.row import Row


def test_row(row: Row, matrix: Matrix) -> None:
    judge(row, matrix)
