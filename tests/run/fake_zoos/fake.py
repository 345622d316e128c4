"""A zoo whose families are named after what the fake judges do with them. Nothing is ever built."""

from parity.rows.family import Family, Zoo


def _never(*_):
    raise AssertionError("fake judges build nothing")


NAMES = (
    "fine always first_only exits segfaults raises leaves hangs family_hangs waits hungry hungry_once "
    "downloads downloads_quietly prints confesses confesses_and_hangs boasts"
)
FAMILIES = [Family("fake", name, "detect", _never, _never) for name in NAMES.split()]
FAMILIES.append(Family("fake", "declared", "detect", _never, _never, unavailable="its weights are licensed"))
ZOO = Zoo("fake", "json", "pip install fake", tuple(FAMILIES), lambda: None, lambda: "1.2.3", lambda: {"backend": "none"})
