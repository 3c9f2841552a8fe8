"""What the event log costs, as a share of the steps of a real model: decodes of a full batch, where steps are shortest.

    python tests/support/event_log_cost.py [MODEL] [SEQUENCES ...]

Prints, for each number of sequences, the step's median, the events of a step, and their share of all steps' time. An
event's cost is measured by itself, since a clock around each would cost more than the event.
"""

from __future__ import annotations

import statistics
import sys
import time
import timeit
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine import LLM, SamplingParams
from engine.events import EventLog

STEPS = 64


def main(model: str = "default", *counts: str) -> None:
    log = EventLog()
    cost = statistics.median(timeit.repeat(lambda: log.add("allocate", 3, 12345, 1), number=10_000, repeat=21)) / 10_000
    print(f"one event: {cost * 1e6:.2f} us")
    for count in map(int, counts or ("1", "8", "32")):
        llm = LLM(model, max_num_seqs=count)
        for i in range(count):
            llm.add_request([100 + i, 5, 6, 7], SamplingParams(max_tokens=STEPS + 40, ignore_eos=True))
        for _ in range(8):
            llm.step()
        seconds, first = [], llm.engine.events.last_seq
        for _ in range(STEPS):
            began = time.perf_counter()
            llm.step()
            seconds.append(time.perf_counter() - began)
        events = llm.engine.events.last_seq - first
        llm.exit()
        share = events * cost / sum(seconds)
        print(
            f"{count:4d} sequences: step {statistics.median(seconds) * 1e3:8.2f} ms, "
            f"{events / STEPS:6.2f} events a step, {share:.5%} of its time"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
