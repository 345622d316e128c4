"""The workflows are what GitHub can run: jobs and steps are whole, actions are pinned, forks never reach the GPU."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

GITHUB = Path(__file__).parents[2] / ".github"
FILES = sorted((GITHUB / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")


def faults(workflow: dict[Any, Any]) -> list[str]:
    """What is wrong with a workflow, as sentences."""
    found = []
    if True not in workflow and "on" not in workflow:  # YAML 1.1 reads the key `on` as true
        found.append("nothing starts it")
    if workflow.get("permissions") != {"contents": "read"}:
        found.append("its token may do more than read")
    if not workflow.get("jobs"):
        found.append("no jobs")
    for name, job in (workflow.get("jobs") or {}).items():
        found += [f"{name} has no {key}" for key in ("runs-on", "steps", "timeout-minutes") if not job.get(key)]
        found += [f"{name} needs {other}, which is none" for other in _listed(job.get("needs")) if other not in workflow["jobs"]]
        if "self-hosted" in _listed(job.get("runs-on")) and "head.repo.full_name == github.repository" not in job.get("if", ""):
            found.append(f"{name} runs code of forks on its own runner")
        for number, step in enumerate(job.get("steps") or (), 1):
            if ("run" in step) == ("uses" in step):
                found.append(f"{name}, step {number}: exactly one of run and uses")
            if "uses" in step and not PINNED.fullmatch(step["uses"]):
                found.append(f"{name}, step {number}: {step['uses']} is not pinned to a commit")
            if "${{ github.event" in step.get("run", ""):
                found.append(f"{name}, step {number}: text of an event goes into a shell; hand it over in env")
    return found


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def test_both_workflows_are_there():
    assert [file.name for file in FILES] == ["gpu.yml", "test.yml"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_workflow_has_no_faults(file):
    assert faults(yaml.safe_load(file.read_text())) == []


GOOD = {"runs-on": "ubuntu-latest", "timeout-minutes": 1, "steps": [{"run": "true"}]}
READ = {"contents": "read"}


@pytest.mark.parametrize(
    ("workflow", "fault"),
    [
        ({"permissions": READ, "jobs": {"a": GOOD}}, "nothing starts it"),
        ({True: "push", "jobs": {"a": GOOD}}, "its token may do more than read"),
        ({True: "push", "permissions": READ}, "no jobs"),
        ({True: "push", "permissions": READ, "jobs": {"a": GOOD | {"steps": []}}}, "a has no steps"),
        ({True: "push", "permissions": READ, "jobs": {"a": GOOD | {"needs": "b"}}}, "a needs b, which is none"),
        (
            {True: "push", "permissions": READ, "jobs": {"a": GOOD | {"runs-on": ["self-hosted"]}}},
            "a runs code of forks on its own runner",
        ),
        (
            {True: "push", "permissions": READ, "jobs": {"a": GOOD | {"steps": [{"uses": "actions/checkout@v4"}]}}},
            "a, step 1: actions/checkout@v4 is not pinned to a commit",
        ),
        (
            {True: "push", "permissions": READ, "jobs": {"a": GOOD | {"steps": [{"name": "x"}]}}},
            "a, step 1: exactly one of run and uses",
        ),
        (
            {
                True: "push",
                "permissions": READ,
                "jobs": {"a": GOOD | {"steps": [{"run": "echo ${{ github.event.x }}"}]}},
            },
            "a, step 1: text of an event goes into a shell; hand it over in env",
        ),
    ],
)
def test_each_fault_is_seen(workflow, fault):
    assert faults(workflow) == [fault]


def _runs(name: str) -> str:
    jobs = yaml.safe_load((GITHUB / "workflows" / name).read_text())["jobs"]
    return "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])


def test_the_workflows_do_what_they_are_for():
    assert "make test" in _runs("test.yml")
    gpu = _runs("gpu.yml")
    for command in (
        "parity certify --engine cuda",
        "parity gate",
        "--junit",
        "GITHUB_STEP_SUMMARY",
        "changed_families.py",
    ):
        assert command in gpu
    assert "--allowlist reports/SUPPORTS_CUDA_GRAPH.json" in gpu, "the committed allowlist, not the one just written"


def _select():
    spec = importlib.util.spec_from_file_location("changed_families", GITHUB / "changed_families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda paths: module.select(paths, exists=lambda path: path != "families/gone.py")


@pytest.mark.parametrize(
    ("paths", "options"),
    [
        ([], "none"),
        (["README.md", "docs/a.md", "parity/record/report.py", "tests/run/test_x.py"], "none"),
        (["families/torchvision.py"], "--zoo torchvision"),
        (["families/libreyolo/towers.py", "families/libreyolo/images.py"], "--zoo libreyolo"),
        (["families/torchvision.py", "families/libreyolo/x.py", "README.md"], "--zoo libreyolo --zoo torchvision"),
        (["families/torchvision.py", "parity/judge/bits.py"], ""),
        (["families/controls/models.py"], ""),
        (["families/__init__.py"], ""),
        (["parity/runtime/cuda.py"], ""),
        (["pyproject.toml"], ""),
        (["families/gone.py"], ""),
        (["families/a b.py"], ""),
        ([".github/workflows/gpu.yml"], ""),
    ],
)
def test_changed_paths_select_what_they_can_have_changed(paths, options):
    assert _select()(paths) == options


def test_the_script_reads_paths_and_prints_an_output():
    told = subprocess.run(
        [sys.executable, "-I", str(GITHUB / "changed_families.py")],
        input="README.md\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "select=none\n"
