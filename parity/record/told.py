"""What a person is told of one record: a line while the run goes on, and in full where it is not the expected one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from parity.judge.verdict import SAFE
from parity.record.explanation import recorded, render
from parity.record.grade import cause_of, graded
from parity.record.learned import FIELD
from parity.record.line import Record, is_expected
from parity.rows.case import CASE

LOST: Final[Mapping[str, str]] = {
    "timed_out": "give it more time (--timeout SECONDS), or find out what it waits for: judge it alone by the command above",
    "out_of_memory": "judge fewer rows at a time (--slots 1)",
    "crashed": "judge it alone by the command above; a crash that comes back is the model's, or a fault to report",
}
"""Verdict to what helps, where the child never told one."""


def line(record: Record) -> str:
    """One line for a person: verdict, and of training the class, row, cause, proof, place."""
    told = record["message"] if record["verdict"] == "unavailable" else cause_of(record)
    cause = f"  {told}" if told else ""
    proof = f"  proved by {', '.join(record['proof'])}" if record.get("proof") else ""
    where = f"  {record['where']}" if record["where"] else ""
    mark = "" if is_expected(record) else f"  (expected {record['expected']})"
    return f"{graded(record):<13} {record['id']}{cause}{proof}{where}{mark}"


def in_full(record: Record) -> str:
    """Why a record is not the expected one, how to see it again, and what a study of it told."""
    detail = record["detail"] or record["message"]
    declared = f"{record['expected']} ({record['expected_reason']})" if record["expected_reason"] else record["expected"]
    if FIELD in record:  # what this engine cannot see is the same for every row: `parity explain` says it
        seen = render(recorded(record) | {"unseen": []}).split("\n", 1)[1].rstrip().split("\n")
    else:
        seen = [f"  check      {record['check'] or '-'}: {detail or '-'}", f"  line       {record['where'] or '-'}"]
    return "\n".join(
        [
            f"{record['id']} is {graded(record)} ({cause_of(record) or 'no cause needed'}), expected {declared}",
            *seen,
            f"  again      {record['command']}",
            f"  settle     {_settled(record)}",
        ]
    )


def _settled(record: Record) -> str:
    """What makes a record the expected one, beside a change of the model."""
    arm, verdict = record["arm"], record["verdict"]
    if record["zoo"] == CASE and verdict not in (*SAFE, *LOST):
        return "mend the model: a case file declares no expectation"
    if verdict in SAFE and record["expected"] not in SAFE:
        return f"it does better than declared: take the expectation for arm {arm!r} out of the family's declaration"
    if verdict in LOST:
        return LOST[verdict]
    if verdict in SAFE:
        return "its class is not the declared one: see `classes` of its declaration"
    declared = f'expected={{"{arm}": (Expect("{verdict}", "why, for a stranger", "{record["cause"]}"),)}}'
    return f"mend the model, or, if it is right and known, declare it in the family: {declared}"
