"""What the idle-share tool makes of a trace, and that it runs on a card."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gpu_idle

ROOT = Path(__file__).resolve().parent.parent


def test_overlapping_kernels_count_once_and_long_gaps_apart() -> None:
    spans = [(30.0, 40.0, "b"), (0.0, 10.0, "a"), (8.0, 12.0, "b"), (9.0, 11.0, "a"), (13.5, 20.0, "a")]
    found = gpu_idle.timeline(spans)
    assert (found.busy, found.gaps, found.waiting) == (12.0 + 6.5 + 10.0, 1.5, 10.0)
    assert found.kernels == [(18.5, 3, "a"), (14.0, 2, "b")]


def test_a_trace_without_kernels_is_all_zero() -> None:
    found = gpu_idle.timeline([])
    assert (found.busy, found.gaps, found.waiting, found.kernels) == (0.0, 0.0, 0.0, [])


@pytest.mark.gpu
def test_the_idle_share_is_told_on_a_card(tiny_qwen3: Path) -> None:
    command = [sys.executable, str(ROOT / "tests/support/gpu_idle.py"), str(tiny_qwen3), "--batches", "2"]
    done = subprocess.run(
        [*command, "--context", "40", "--steps", "10"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "batch 2, context 40: " in done.stdout and " us  " in done.stdout
