"""How much of the steps' time the GPU computes nothing, and which kernels it spends the rest on.

    python tests/support/gpu_idle.py MODEL [--batches 1,8,256] [--context 256] [--steps 40] [--top 12]

MODEL is a folder as for app.py, or one with a config.json alone, which gets random weights. Every batch decodes at
temperature 0.6 behind `context` tokens. Three figures a batch, of the time from the first kernel to the last:

    busy     some kernel runs
    gaps     none does, for less than 5 us: between the kernels of a step
    waiting  none does, for longer: for the host

Tracing slows the host and, a little, the change from kernel to kernel, so the step's time without it is given, too, and
the share of it that the kernels do not fill: that is the idle share. A step takes longer the longer its sequences are,
so its time is the mean of as many steps before the traced ones and behind them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SHORT_US = 5.0
WARM_UP_S = 2.0


@dataclass(frozen=True)
class Timeline:
    """Microseconds, see the module's docstring. kernels: (time, calls, name), the costliest first."""

    busy: float
    gaps: float
    waiting: float
    kernels: list[tuple[float, int, str]]


def timeline(spans: Iterable[tuple[float, float, str]]) -> Timeline:
    """Of kernels' (start, end, name), which may overlap."""
    spans = sorted(spans)
    busy = gaps = waiting = 0.0
    end = spans[0][0] if spans else 0.0
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for start, stop, name in spans:
        gap = max(0.0, start - end)
        if gap < SHORT_US:
            gaps += gap
        else:
            waiting += gap
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        times[name] += stop - start
        calls[name] += 1
    return Timeline(busy, gaps, waiting, [(total, calls[name], name) for name, total in times.most_common()])


def traced(run: Callable[[], None]) -> Timeline:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    on_card = [event for event in trace.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    return timeline((event.time_range.start, event.time_range.end, event.name) for event in on_card)


def measure(model: str, batch: int, context: int, steps: int, top: int) -> None:

    from engine import LLM, SamplingParams
    from engine.heap import rare_collections, settled_heap

    while_prompts_come = batch * context // 512
    params = SamplingParams(temperature=0.6, max_tokens=3 * steps + 50 + while_prompts_come, ignore_eos=True)
    llm = LLM(model, device="cuda", max_num_seqs=batch, max_model_len=context + params.max_tokens)
    vocab = min(10_000, llm.engine.runner.model_config.vocab_size)  # type: ignore[attr-defined]
    prompts = [[(7919 * i + 31 * j * j + j) % vocab for j in range(context)] for i in range(batch)]
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_UP_S:  # a card that was at rest has a lower clock for a while
        llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=steps, ignore_eos=True), use_tqdm=False)
    ids = [llm.engine.add_request(prompt, params) for prompt in prompts]

    def run(count: int) -> None:
        for _ in range(count):
            llm.engine.step()

    def timed() -> float:
        """Seconds of steps that follow each other: from when one is done until the last of so many more is."""
        run(2)
        began = time.perf_counter()
        run(steps)
        return time.perf_counter() - began

    answering: set[int] = set()
    while len(answering) < len(ids):  # the prompts, which take as many steps as they may
        answering |= {output.request_id for output in llm.engine.step() if output.new_token_ids}
    run(10)  # what the first decodes set up
    with settled_heap(), rare_collections():  # as where an engine serves
        before = timed()
        found = traced(lambda: run(steps))
        step = 1e6 * (before + timed()) / (2 * steps)
    llm.exit()
    busy = found.busy / steps
    print(
        f"batch {batch}, context {context}: {step:,.0f} us a step, of which {busy:,.0f} us some kernel runs: idle "
        f"{max(0.0, 1 - busy / step):.1%} (traced: {found.gaps / steps:,.0f} us of gaps, "
        f"{found.waiting / steps:,.0f} us of waiting)"
    )
    for total, calls, name in found.kernels[:top]:
        print(f"  {total / steps:9.1f} us  {calls / steps:6.1f} x {total / calls:8.2f} us  {name[:90]}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Idle share of the GPU; see the head of this file")
    parser.add_argument("model")
    parser.add_argument("--batches", default="1,8,256")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--top", type=int, default=12)
    o = parser.parse_args()
    import bench

    with tempfile.TemporaryDirectory() as folder:
        model = o.model
        if (Path(model) / "config.json").exists() and not list(Path(model).glob("*.safetensors")):
            bench.make_random(model, folder, "cuda")
            model = folder
        for batch in map(int, o.batches.split(",")):
            measure(model, batch, o.context, o.steps, o.top)


if __name__ == "__main__":
    main()
