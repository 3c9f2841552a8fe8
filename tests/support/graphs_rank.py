"""A real rank on a CPU whose steps run as graphs, which are imitated (fake_graphs.py): rank.py's main function.

An event of a step happens LAG seconds after the step was launched, so that steps can be launched behind it. From the
environment: FULL_RANK, the rank whose memory holds no more than FULL_AFTER graphs.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from engine import rank
from engine.rank import RankSetup

LAG = 0.005
_GRAPH_BYTES = 2**40


def main(setup: RankSetup, channel: Connection) -> None:
    import fake_graphs
    from engine import model_runner, step_graphs

    class Recorder(fake_graphs.FakeRecorder):
        def used_bytes(self) -> int:
            full = os.environ.get("FULL_RANK") == str(setup.rank)
            return _GRAPH_BYTES if full and self.recorded >= int(os.environ["FULL_AFTER"]) else 0

        def event(self) -> Any:
            happens = [0.0]
            return SimpleNamespace(
                record=lambda: happens.__setitem__(0, time.perf_counter() + LAG),
                query=lambda: time.perf_counter() >= happens[0],
                synchronize=lambda: time.sleep(max(0.0, happens[0] - time.perf_counter())),
            )

    patch = pytest.MonkeyPatch()
    fake_graphs.install(patch)
    patch.setattr(step_graphs, "CudaRecorder", Recorder)
    patch.setattr(model_runner.ModelRunner, "warm_up", lambda self, progress: 1)
    rank.main(setup, channel)
