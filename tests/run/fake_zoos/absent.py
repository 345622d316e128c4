"""A zoo that is not installed."""

from parity.rows.family import Family, Zoo

FAMILY = Family("absent", "fine", "detect", min, max)
ZOO = Zoo("absent", "no_such_package.models", "pip install no-such-package", (FAMILY,), print, str)
