"""Small data sets of generated images, in the folders that LibreYOLO's loaders read. Alike for equal arguments."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

_EDGES = (200, 160)  # pixels, width and height: no size that a network takes as it is
_NAMES = {"detect": 80, "point": 1, "semantic": 19}
_SPLITS = ("train", "val")


def _image(rng: random.Random, channels: int = 3, values: int = 256) -> Any:
    import numpy
    from PIL import Image

    width, height = _EDGES
    content = numpy.frombuffer(rng.randbytes(width * height * channels), dtype=numpy.uint8) % numpy.uint16(values)
    shape = (height, width, channels) if channels > 1 else (height, width)
    return Image.fromarray(content.astype(numpy.uint8).reshape(shape))


def _yaml(folder: Path, task: str, **more: str) -> Path:
    """JSON is YAML too."""
    names = [f"class{i}" for i in range(_NAMES.get(task, 0))]
    found = {"path": str(folder), "train": "images/train", "val": "images/val", "nc": len(names), "names": names, **more}
    target = folder / "data.yaml"
    target.write_text(json.dumps(found))
    return target


def _boxes(classes: int, folder: Path, split: str, index: int, rng: random.Random) -> None:
    image = folder / "images" / split / f"{index}.png"
    label = folder / "labels" / split / f"{index}.txt"
    _save(_image(rng), image)
    label.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"{rng.randrange(classes)} {0.3 + 0.1 * k:.3f} {0.4 + 0.1 * k:.3f} 0.3 0.35\n" for k in range(1 + rng.randrange(3)))
    label.write_text("".join(lines))


def _save(image: Any, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    image.save(target)


def _classified(folder: Path, split: str, index: int, rng: random.Random) -> None:
    _save(_image(rng), folder / split / f"class{index % 2}" / f"{index}.png")


def _masked(folder: Path, split: str, index: int, rng: random.Random) -> None:
    _save(_image(rng), folder / "images" / split / f"{index}.png")
    _save(_image(rng, 1, _NAMES["semantic"]), folder / "masks" / split / f"{index}.png")


def _paired(folder: Path, split: str, index: int, rng: random.Random) -> None:
    _save(_image(rng), folder / split / "inputs" / f"{index}.png")
    _save(_image(rng), folder / split / "targets" / f"{index}.png")


_MAKERS: dict[str, Callable[[Path, str, int, random.Random], None]] = {
    "detect": functools.partial(_boxes, _NAMES["detect"]),
    "point": functools.partial(_boxes, _NAMES["point"]),
    "classify": _classified,
    "semantic": _masked,
    "restore": _paired,
}


def dataset(folder: Path, task: str, train: int, val: int, seed: int = 0) -> Path:
    """Writes ``train`` and ``val`` images with their targets below ``folder``; returns what ``train(data=...)`` takes."""
    rng = random.Random(seed)
    for split, count in zip(_SPLITS, (train, val), strict=True):
        for index in range(count):
            _MAKERS[task](folder, split, index, rng)
    if task == "classify":
        return folder
    if task == "restore":
        return _yaml(folder, task, train="train/inputs", val="val/inputs", target_train="train/targets")
    return _yaml(folder, task, **({"masks": "masks", "masks_dir": "masks"} if task == "semantic" else {}))
