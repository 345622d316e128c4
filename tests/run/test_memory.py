"""Freed memory stays with a child within a row, and what is more than its share goes back between rows."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from parity.run.memory import fair_share

PROGRAM = """
import resource, torch
from parity.run.memory import hold

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 2**20

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def use():
    before = faults()
    torch.ones(2**26)  # 256 MiB
    return faults() - before

give_back = hold({share}) if {held} else lambda: None
for _ in range(10):  # an aligned block fits into a freed one only with room to spare
    use()
again, kept = use() + use(), resident()
give_back()
print(again, kept, resident())
"""


def measured(held: bool, share: int = 0) -> tuple[int, int, int]:
    """Page faults of two more uses of as much memory; resident MiB after it, and after giving back."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(held=held, share=share)], text=True, capture_output=True, check=True)
    again, kept, left = map(int, done.stdout.split())
    return again, kept, left


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_what_is_freed_is_used_again_and_given_back() -> None:
    again, kept, left = measured(held=True)
    assert kept - left > 200
    assert again * 10 < measured(held=False)[0]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_a_process_within_its_share_keeps_what_it_has() -> None:
    _, kept, left = measured(held=True, share=2**40)
    assert kept - left < 20
    assert 2**28 < fair_share() < 2**45
