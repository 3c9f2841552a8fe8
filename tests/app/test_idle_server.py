"""A server with nothing to do: it hardly uses the processor, and ends at once when it is told to."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.support.app_process import AppProcess


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_server_uses_little_of_a_core_and_ends_when_told(tmp_path: Path, default_model_path: Path) -> None:
    argv = ("--model", str(default_model_path), "--num-kvcache-blocks", "600")
    with AppProcess(*argv, data_dir=tmp_path / "data") as server:
        server.wait_ready()
        time.sleep(1)
        before, began = processor_seconds(server.process.pid), time.monotonic()
        time.sleep(3)
        share = (processor_seconds(server.process.pid) - before) / (time.monotonic() - began)
        assert server.end() == 0, server.log()
    assert share < 0.04
