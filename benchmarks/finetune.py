"""A short fine-tune through LibreYOLO's own ``train()``: eager, eager once more, graphed by us, and by the library.

    python benchmarks/finetune.py                           # CUDA: yolo9-t, mobilenetv4, segformer; three epochs, AMP on
    python benchmarks/finetune.py --hard                    # domedetr and tinyformer, which no graph takes: they must finish, eagerly
    python benchmarks/finetune.py --emulated --family mobilenetv4       # no GPU; the times say nothing about a device

Generated images. Losses of every step and epoch, metrics of validation, and the bits of all final weights and of their average, against
eager's. Where eager does not repeat itself, that is said, and nothing is claimed of the graphed run. cuDNN is asked for deterministic
kernels. Exits with 1 where eager repeats itself and our run differs, or where a run does not finish.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from families.libreyolo.finetune import Finetuned, train_once
from parity.runtime import rng

CASES = {"yolo9": (320, 8), "mobilenetv4": (224, 16), "segformer": (256, 8)}
HARD = {"domedetr": (320, 4), "tinyformer": (640, 4)}
HEADS = ["train()", "eager s", "graphed s", "speed-up", "against eager", "replays", "why eager"]


@contextmanager
def engine(emulated: bool) -> Iterator[None]:
    """Raises SystemExit where there is no device and none was asked to be emulated."""
    with ExitStack() as stack:
        if emulated:
            from parity.runtime.emulated import device

            print("emulated: these times say nothing about a device")
            stack.enter_context(device())
        elif not torch.cuda.is_available():
            raise SystemExit("no CUDA device: give --emulated for a run that only shows that this works")
        else:
            print(torch.cuda.get_device_name(), "torch", torch.__version__)
        torch.backends.cudnn.deterministic = True
        yield


def line(eager: Finetuned, noise: list[str], run: Finetuned) -> list[Any]:
    differing = run.differs(eager)
    verdict = f"differs: {', '.join(differing)}" if differing else "equal"
    if noise:
        verdict = f"eager differs from itself: {', '.join(noise)}"
    spent = [sum(one.epoch_seconds) for one in (eager, run)]
    told = [f"{spent[0]:.1f}", f"{spent[1]:.1f}", f"{spent[0] / spent[1]:.2f}x"]
    return [f"{run.family}, {run.graphs}", *told, verdict, "" if run.replays is None else run.replays, run.reason]


def compare(family: str, options: dict[str, Any], upstream: bool) -> tuple[list[list[Any]], bool]:
    """Lines of the table, and whether our run is wrong."""
    eager, again = train_once(family, "off", **options), train_once(family, "off", **options)
    ours = train_once(family, "parity", **options)
    noise = again.differs(eager)
    print(f"{family}: epochs {[round(loss, 5) for loss in ours.epochs]}, weights {ours.weights[:16]}, eager's {eager.weights[:16]}")
    print(f"  metrics {ours.metrics[-1:]}", flush=True)
    lines = [line(eager, noise, ours)]
    if upstream:
        streams = rng.save()
        try:
            lines.append(line(eager, noise, train_once(family, "upstream", **options)))
        except Exception as error:  # the library's own failure is a result here
            lines.append([f"{family}, upstream", "", "", "", f"{type(error).__name__}: {str(error).splitlines()[0][:90]}", "", ""])
            torch.cuda.set_stream(torch.cuda.default_stream())  # its capture may have left another
            rng.repair(streams)  # and generators that refuse to draw
    return lines, bool(not noise and ours.differs(eager))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulated", action="store_true", help="on the emulated engine, small")
    parser.add_argument("--hard", action="store_true", help="the two families whose capture is refused")
    parser.add_argument("--family", action="append", choices=[*CASES, *HARD], default=[])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=0, help="of the training split; default: ten batches and a half")
    parser.add_argument("--without-upstream", action="store_true")
    chosen = parser.parse_args()
    cases = HARD if chosen.hard else CASES
    rows, wrong = [], False
    with engine(chosen.emulated):
        for family in chosen.family or cases:
            size, batch = (None, 2) if chosen.emulated else {**CASES, **HARD}[family]
            images = chosen.images or (batch * 21 // 2 if not chosen.emulated else 9)
            options = {"epochs": chosen.epochs, "batch": batch, "size": size, "images": images, "amp": True}
            if not chosen.emulated:  # the first run of a process may differ from every later one
                train_once(family, "off", **{**options, "epochs": 1, "images": batch * 2})
            lines, bad = compare(family, options, not chosen.without_upstream)
            rows += lines
            wrong |= bad
    print(tabulate(rows, headers=HEADS, tablefmt="github"))
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
