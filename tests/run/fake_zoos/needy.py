"""A zoo that is installed, without one of its own dependencies."""

import importlib

from parity.rows.family import Family, Zoo

ZOO = Zoo(
    "needy",
    "json",
    "pip install needy[all]",
    (Family("needy", "fine", "detect", min, max),),
    lambda: importlib.import_module("no_such_dependency"),
    str,
)
