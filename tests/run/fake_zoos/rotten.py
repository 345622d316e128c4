"""A zoo whose import raises."""

from parity.rows.family import Family, Zoo


def _warm():
    raise RuntimeError("rotten to the core")


ZOO = Zoo("rotten", "json", "pip install rotten", (Family("rotten", "fine", "detect", min, max),), _warm, str)
