"""JUnit XML from evidence, for CI systems: a test case a row, failed where the verdict is not the declared one. A row of
training that is safe has its class, proof and cause as properties. A row that was explained has the explanation as its output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree

from parity.record.explanation import recorded, render
from parity.record.files import write_atomic
from parity.record.grade import cause_of, proof_text, verdict_text
from parity.record.learned import FIELD
from parity.record.line import Record, is_expected

_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what XML 1.0 cannot hold


def _text(value: object) -> str:
    return _ILLEGAL.sub("?", str(value))


def render_junit(records: Iterable[Record]) -> str:
    """One suite. Times are the rows' own seconds; they ran side by side, so their sum is no wall clock."""
    cases = [_case(record) for record in sorted(records, key=lambda record: str(record["id"]))]
    suite = ElementTree.Element(
        "testsuite",
        name="parity",
        tests=str(len(cases)),
        failures=str(_count(cases, "failure")),
        skipped=str(_count(cases, "skipped")),
        errors="0",
        time=f"{sum(float(case.attrib['time']) for case in cases):.3f}",
    )
    suite.extend(cases)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _count(cases: Sequence[ElementTree.Element], kind: str) -> int:
    return sum(case.find(kind) is not None for case in cases)


def _case(record: Record) -> ElementTree.Element:
    name = f"{record['zoo']}.{record['family']}.{record['task']}"
    case = ElementTree.Element("testcase", classname=_text(name), name=_text(record["id"]), time=f"{record['seconds']:.3f}")
    if record.get("class"):
        told = ElementTree.SubElement(case, "properties")
        for key, value in (("class", record["class"]), ("proof", proof_text(record["proof"])), ("cause", cause_of(record))):
            ElementTree.SubElement(told, "property", name=key, value=_text(value))
    if record["verdict"] == "unavailable":
        ElementTree.SubElement(case, "skipped", message=_text(record["message"] or "unavailable"))
    elif not is_expected(record):
        message = f"{verdict_text(record)}, declared {record['expected']}"
        failure = ElementTree.SubElement(case, "failure", message=_text(message))
        failure.text = _text(f"{record['detail'] or record['message']}\n{record['where']}\n{record['command']}")
    if FIELD in record:
        ElementTree.SubElement(case, "system-out").text = _text(render(recorded(record)))
    return case


def write_junit(records: Iterable[Record], path: str | Path) -> None:
    """Replaces the file as a whole. Raises RecordError; the old file then stays."""
    write_atomic(Path(path), render_junit(records))
