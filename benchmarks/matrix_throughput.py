"""How fast the matrix is judged: warm children against a fresh process per row, in one run, imports of the warm server excluded.

    python benchmarks/matrix_throughput.py --zoo libreyolo --zoo torchvision
    python benchmarks/matrix_throughput.py --zoo libreyolo --family fomo --family yolox --engine emulated

Both ways judge the same rows (arm ``graphed``, recommended sizes, whole protocol) with as many slots. Prints seconds, their ratio, and
what the seconds were spent on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from tabulate import tabulate

from parity.certification import groups_of
from parity.record.evidence import read_evidence
from parity.rows.discovery import Selection, discover
from parity.rows.row import Row
from parity.run.isolate import Options, Pool, probe

FAMILIES = Path(__file__).resolve().parent.parent / "families"


def timed(
    rows: Sequence[Row], isolation: str, engine: str, devices: tuple[str, ...], slots: int, hints: Mapping[str, float]
) -> dict[str, object]:
    """Judges ``rows`` one way. Warm: one row is judged first, so that importing the zoo is not counted."""
    options = Options(engine, (str(FAMILIES),), slots=slots, isolation=isolation, devices=devices, timeout=600)
    with Pool(options) as pool:
        if isolation == "warm":
            list(pool.run(groups_of(rows[:1])))
        start = time.perf_counter()
        outcomes = list(pool.run(groups_of(rows), hints))
        wall = time.perf_counter() - start
        spent = {phase: sum(o.seconds.get(phase, 0.0) for o in outcomes) for phase in ("reference", "arm", "total")}
        return {
            "isolation": isolation,
            "rows": len(outcomes),
            "wall s": round(wall, 1),
            "rows/s": round(len(outcomes) / wall, 2),
            "children": pool.stats.children,
            "judged again": pool.stats.again,
            "start s (sum)": round(sum(pool.stats.starts), 1),
            "reference s (sum)": round(spent["reference"], 1),
            "arm s (sum)": round(spent["arm"], 1),
            "not judged": sum(o.status != "judged" for o in outcomes),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", action="append", default=[])
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--engine", default="auto", choices=("auto", "cuda", "emulated"))
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="only every n-th row, both ways: fresh processes are slow")
    parser.add_argument("--hints", type=Path, help="evidence whose seconds decide which rows start first, as in any later run")
    parser.add_argument("--without", action="append", default=[], choices=("warm", "spawn"))
    args = parser.parse_args()
    hints = {r["id"]: float(r["seconds"]) for r in read_evidence(args.hints)} if args.hints else {}
    catalogue = discover([FAMILIES])
    found = probe(catalogue.sources, args.engine)
    for zoo in args.zoo or ["libreyolo"]:
        selection = Selection(zoos=(zoo,), families=tuple(args.family), modes=("inference",), arms=("graphed",), boundary="")
        rows = [r for r in catalogue.select(selection) if not catalogue.family(r).unavailable][:: args.every]
        ways = [way for way in ("warm", "spawn") if way not in args.without]
        devices = tuple(found["devices"])
        print(f"{zoo}, {found['engine']} engine, {found['environment'].get('gpu') or found['environment'].get('cpu')}", flush=True)
        results = []
        for way in ways:
            results.append(timed(rows, way, found["engine"], devices, args.slots, hints))
            print(results[-1], flush=True)  # a run that is cut short has still said something
        table = pd.DataFrame(results)
        print(tabulate(table, headers="keys", tablefmt="github", showindex=False))
        if len(ways) == 2:
            print(f"a fresh process per row takes {table['wall s'][1] / table['wall s'][0]:.1f} times as long")


if __name__ == "__main__":
    main()
