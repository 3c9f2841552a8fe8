"""The Triton kernels in Triton's interpreter, on a CPU. In a process of its own: triton decides at its import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)  # one to three minutes by the machine
@pytest.mark.parametrize(
    ("cases", "at_least"),
    [("kernel_cases.py", 80), ("sampling_cases.py step_rows_cases.py sum_norm_cases.py", 24)],
)
def test_the_kernels_equal_their_references(cases: str, at_least: int) -> None:
    pytest.importorskip("triton")
    plugins = ("-p", "no:cacheprovider", "-p", "quick_interpreter")
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plugins, *(f"tests/models/{one}" for one in cases.split())]
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""}
    env["OMP_NUM_THREADS"] = (
        "1"  # the interpreter has one thread; others would only be in the way of the tests beside it
    )
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=580)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed and int(passed[1]) >= at_least, ran.stdout[-2000:]
