"""The options that commands share: each is spelled, and told of, in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Names = list[str]
Zoo = Annotated[Names, typer.Option("--zoo", help="Exact zoo; repeatable.")]
FamilyName = Annotated[Names, typer.Option("--family", help="Exact family; repeatable.")]
Task = Annotated[Names, typer.Option("--task", help="Exact task; repeatable.")]
Mode = Annotated[Names, typer.Option("--mode", help="inference or training; repeatable.")]
ArmName = Annotated[Names, typer.Option("--arm", help="eager, bare, graphed or native; repeatable.")]
Dtype = Annotated[
    Names, typer.Option("--dtype", help="float16, bfloat16 or float32: what autocast casts to in a training row; repeatable.")
]
Size = Annotated[str, typer.Option("--size", help="recommended, native, all, or an edge in pixels.")]
Boundary = Annotated[str | None, typer.Option("--boundary", help="Only rows cut there, such as 'whole'.")]
EngineName = Annotated[str, typer.Option("--engine", help="cuda, emulated, or auto: cuda where a child finds a device.")]
Families = Annotated[
    Names, typer.Option("--families", help="Folder of families; repeatable. Default: ./families, else those installed.")
]
Reports = Annotated[Path, typer.Option("--reports", help="Where evidence, allowlist and matrix lie.")]
NoReports = Annotated[bool, typer.Option("--no-reports", help="Leave reports/ untouched.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds per row.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of weights and probes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
