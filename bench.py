"""The benchmarks: python bench.py [--engine pageturn,transformers,...] [--workload NAME,...|all] [--json FILE]

Every engine runs in a process of its own and does the same work on the same token ids, at temperature 0.6 and
with the end-of-sequence token ignored. On a CPU the engines take turns run by run, so that a noisy machine hits
all of them alike; on a GPU, where each wants the memory for itself, one engine follows the other.

    python bench.py --table FILE...    what --json has left there as tables in Markdown, with the goals and bounds

A run gives one figure a metric; the table and the JSON give the median, the JSON all runs too. No two runs share
a prompt, so nothing is reused unless the workload says so.

    decode_bN              N prompts of 256 tokens, 128 new tokens each: 128 * N over (time for 129 new tokens) -
                           (time for 1), on fresh prompts both times. On a GPU 128 prompt tokens, and at N = 1
                           256 new ones.
    prefill_1024           prompt tokens per second of one 1,024-token prompt, its first new token included
    ttft_cold, _cold_3584  time to the first token of a prompt of 1,024 (3,584) tokens never seen before
    ttft_turn2             the same for a 1,024-token history that was just served, plus 64 new tokens
      _turn2_3584_64       (3,584 + 64). transformers gets its past_key_values back, llama.cpp its sequence.
    ttft_turn2_nocache     ttft_turn2 with PageTurn's prefix cache off: what the reuse is worth
    load                   from the start of the process, imports included, until the engine is ready and until
                           its first token; the files are in the page cache
    offline_256            new tokens per second of 256 requests of 100-1,024 tokens in and out (nano-vllm's bench)
    prefill_32x1024        prompt tokens per second of 32 prompts at once
    ..._thread             offline_256, decode_bN through the engine's thread, its deltas read by one event loop: what
                           the page uses, against the bare engine (GPU)
    chat_N                 N conversations of 6 turns (128 tokens asked, 128 answered) that share a 512-token system
                           prompt, each sending its next turn as the last one ends, through the async engine
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

import bench_table
from bench_engines import ENGINES, Engine, NotOffered, Setup

ANSWER_LIMIT_S = 1800.0  # an engine that needs longer for one run is taken for hung
UNITS = {
    "decode": "tok/s", "prefill": "tok/s", "throughput": "tok/s", "ttft": "ms", "ready": "s", "first_token": "s",
    "ttft_first_p50": "ms", "ttft_later_p50": "ms", "ttft_later_p95": "ms", "prompt_tokens_cached": "share",
}  # fmt: skip
Figures = dict[str, float]  # metric -> value in its unit


# ------------------------------------------------------------------------------------------- workloads


def token_ids(n: int, *seed: object) -> list[int]:
    """n ids below 10,000, the same for the same seed."""
    draw = random.Random(repr(seed))
    return [draw.randrange(10000) for _ in range(n)]


def seconds(engine: Engine, prompts: list[list[int]], max_tokens: list[int]) -> float:
    start = time.perf_counter()
    engine.generate(prompts, max_tokens)
    return time.perf_counter() - start


def decode(engine: Engine, k: int, batch: int, prompt: int, new: int) -> Figures:
    def timed(count: int) -> float:
        return seconds(engine, [token_ids(prompt, "decode", batch, k, count, i) for i in range(batch)], [count] * batch)

    first = timed(1)
    return {"decode": new * batch / (timed(new + 1) - first)}


def prefill(engine: Engine, k: int, count: int, length: int) -> Figures:
    prompts = [token_ids(length, "prefill", count, k, i) for i in range(count)]
    return {"prefill": count * length / seconds(engine, prompts, [1] * count)}


def ttft(engine: Engine, k: int, history: int, new: int = 0) -> Figures:
    """new > 0: the turn after the history has been served once."""
    prompt = token_ids(history, "ttft", new, k)
    if new:
        engine.generate([prompt], [1])
    return {"ttft": 1e3 * seconds(engine, [prompt + token_ids(new, "asked", k)], [1])}


def first_token(engine: Engine, k: int) -> Figures:
    """The end of `load`; the process that started this one holds the clock."""
    engine.generate([token_ids(16, "load", k)], [1])
    return {}


def offline_256(engine: Engine, k: int) -> Figures:
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    new = [draw.randint(100, 1024) for _ in range(256)]
    return {"throughput": sum(new) / seconds(engine, [[(t + 7 * k) % 10000 for t in p] for p in prompts], new)}


def chat(engine: Engine, k: int, count: int, turns: int = 6, system: int = 512, user: int = 128, reply: int = 128):
    first: list[float] = []
    later: list[float] = []
    hit = asked = 0

    async def converse(c: int) -> None:
        nonlocal hit, asked
        history = token_ids(system, "system", count, k)
        for turn in range(turns):
            history = history + token_ids(user, "user", count, k, c, turn)
            waited, new, cached = await engine.turn(history, reply)
            (later if turn else first).append(1e3 * waited)
            if turn:
                hit, asked = hit + cached, asked + len(history)
            history = history + new

    async def everyone() -> None:
        await asyncio.gather(*(converse(c) for c in range(count)))

    start = time.perf_counter()
    engine.loop.run_until_complete(everyone())
    rate = count * turns * reply / (time.perf_counter() - start)
    first, later = sorted(first), sorted(later)
    return {
        "throughput": rate, "ttft_first_p50": first[len(first) // 2], "ttft_later_p50": later[len(later) // 2],
        "ttft_later_p95": later[int(0.95 * len(later))], "prompt_tokens_cached": hit / asked,
    }  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """mode is the kind of process that runs it (see Setup); "load" has a new one for every run."""

    run: Callable[[Engine, int], Figures]
    runs: int = 5
    mode: str = "offline"


def workloads(device: str) -> dict[str, Workload]:
    prompt, long = (128, 256) if device == "cuda" else (256, 128)
    return {
        "decode_b1": Workload(partial(decode, batch=1, prompt=prompt, new=long)),
        "decode_b8": Workload(partial(decode, batch=8, prompt=prompt, new=128)),
        "decode_b32": Workload(partial(decode, batch=32, prompt=prompt, new=128)),
        "prefill_1024": Workload(partial(prefill, count=1, length=1024), runs=7),
        "prefill_32x1024": Workload(partial(prefill, count=32, length=1024), runs=3),
        "ttft_cold": Workload(partial(ttft, history=1024), runs=7),
        "ttft_turn2": Workload(partial(ttft, history=1024, new=64), runs=7),
        "ttft_turn2_nocache": Workload(partial(ttft, history=1024, new=64), runs=7, mode="nocache"),
        "ttft_cold_3584": Workload(partial(ttft, history=3584), runs=7),
        "ttft_turn2_3584_64": Workload(partial(ttft, history=3584, new=64), runs=7),
        "offline_256": Workload(offline_256, runs=2),
        "offline_256_thread": Workload(offline_256, runs=2, mode="chat"),
        "decode_b1_thread": Workload(partial(decode, batch=1, prompt=prompt, new=long), mode="chat"),
        "decode_b32_thread": Workload(partial(decode, batch=32, prompt=prompt, new=128), mode="chat"),
        **{f"chat_{n}": Workload(partial(chat, count=n), runs=1, mode="chat") for n in (1, 16, 64, 256)},
        "load": Workload(first_token, runs=3, mode="load"),
    }


DEFAULT = {
    "cpu": "decode_b1 decode_b8 prefill_1024 ttft_cold ttft_turn2 ttft_turn2_nocache load",
    "cuda": "offline_256 decode_b1 decode_b8 decode_b32 ttft_cold_3584 ttft_turn2_3584_64 prefill_32x1024 "
    "chat_1 chat_16 chat_64 chat_256 offline_256_thread decode_b1_thread decode_b32_thread",
}


# --------------------------------------------------------------------------- one process for each engine


def serve(setup: Setup) -> None:
    """The worker: load the engine and say so, then answer every workload that is asked for on stdin with a line of
    JSON: a figure per metric, or the reason why there is none."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engines print goes to stderr, away from the answers
    table, engine = workloads(setup.device), Engine()

    def start() -> dict[str, Any]:
        nonlocal engine
        engine = ENGINES[setup.engine](setup)
        if setup.mode == "chat":  # warm up threads, allocators, lazy imports
            chat(engine, -1, count=4)
        elif setup.mode != "load":
            engine.generate([token_ids(300, "warm-up", i) for i in range(2)], [16, 16])
        versions = {package: importlib.metadata.version(package) for package in engine.packages}
        return {"dtype": engine.dtype, "versions": versions}

    def answer(work: Callable[[], dict[str, Any]]) -> bool:
        try:
            said = work()
        except ModuleNotFoundError as e:
            said = {"error": f"not installed ({e.name})"}
        except NotOffered as e:
            said = {"not_offered": str(e)}
        except Exception as e:
            traceback.print_exc()
            said = {"error": f"{type(e).__name__}: {e}".splitlines()[0]}
        print(json.dumps(said), file=answers, flush=True)
        return "versions" in said

    if answer(start):
        for line in sys.stdin:
            name, k = json.loads(line)
            answer(lambda run=table[name].run, k=k: run(engine, k))


class Failed(Exception):
    """An engine's process ended, hung or reported a fault; the message is the reason."""


class Worker:
    """The parent's end of one engine's process; `started` is the clock just before it was made. The process leads a
    group, so that what it has started ends with it; limit: seconds that an answer may take."""

    def __init__(self, setup: Setup, limit: float) -> None:
        self.limit, self.killed = limit, False
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(asdict(setup))], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.log, start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        """The process's next answer. Raises Failed or NotOffered."""
        assert self.process.stdout
        watchdog = threading.Timer(self.limit, self.kill)
        watchdog.start()
        line = self.process.stdout.readline()
        watchdog.cancel()
        if not line:
            self.log.seek(0)
            said = [text for text in self.log.read().splitlines() if text.strip()] or ["it said nothing"]
            if self.killed:
                raise Failed(f"no answer within {self.limit:g} s; it last said: {said[-1].strip()}")
            raise Failed(f"its process ended with code {self.process.wait()}: {said[-1].strip()}")
        said = json.loads(line)
        if "not_offered" in said:
            raise NotOffered(said["not_offered"])
        if "error" in said:
            raise Failed(said["error"])
        return said

    def run(self, workload: str, k: int) -> Figures:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # of a dead process; answer() has the reason
            print(json.dumps([workload, k]), file=self.process.stdin, flush=True)
        return self.answer()

    def kill(self) -> None:
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The end of its input ends the process; one that does not react is killed, and so is one in whose midst this
        program is ended."""
        try:
            if kind is None:
                self.process.communicate(timeout=60)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            pass
        self.kill()  # what is left of its group
        self.process.wait()
        self.log.close()


@dataclass
class Results:
    """runs: the figures by (workload, metric, engine). missing: (is a failure, why) by (workload, engine).
    about: what each engine's process said of itself."""

    runs: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    missing: dict[tuple[str, str], tuple[bool, str]] = field(default_factory=dict)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)

    @contextlib.contextmanager
    def reasons(self, engine: str, names: list[str]) -> Iterator[None]:
        """A fault inside the block is the reason why these workloads have no figure."""
        try:
            yield
        except (Failed, NotOffered) as e:
            self.missing.update({(name, engine): (isinstance(e, Failed), str(e)) for name in names})

    def add(self, workload: str, engine: str, figures: Figures) -> None:
        for metric, value in figures.items():
            self.runs.setdefault((workload, metric, engine), []).append(round(value, 4))


def measure(
    setup: Setup, engines: list[str], names: list[str], runs: int | None, limit: float, results: Results
) -> Iterator[str]:
    """Run everything; yields the name of each workload when it is done."""
    table = workloads(setup.device)

    def load(engine: str, k: int) -> Figures:
        with Worker(replace(setup, engine=engine, mode="load"), limit) as worker:
            results.about[engine] = worker.answer()
            ready = time.perf_counter() - worker.started
            worker.run("load", k)
            return {"ready": ready, "first_token": time.perf_counter() - worker.started}

    for mode in dict.fromkeys(table[name].mode for name in names):
        wanted = [name for name in names if table[name].mode == mode]
        for side in [engines] if setup.device == "cpu" else [[e] for e in engines]:
            with contextlib.ExitStack() as stack:
                workers: dict[str, Worker] = {}
                for e in side if mode != "load" else ():
                    workers[e] = stack.enter_context(Worker(replace(setup, engine=e, mode=mode), limit))
                    with results.reasons(e, wanted):
                        results.about[e] = workers[e].answer()
                for name in wanted:
                    for k in range(runs or table[name].runs):
                        for e in [e for e in side if (name, e) not in results.missing]:
                            with results.reasons(e, [name]):
                                results.add(name, e, workers[e].run(name, k) if workers else load(e, k))
                    yield name


# ---------------------------------------------------------------------------------------------- report


def rows(setup: Setup, card: str, results: Results) -> list[dict[str, Any]]:
    return [
        {
            "workload": name, "metric": metric, "unit": UNITS[metric], "engine": engine,
            "model": Path(setup.model).name, "tp": setup.tensor_parallel_size, "dtype": results.about[engine]["dtype"],
            "kv_dtype": setup.kv_cache_dtype, "speculation": None, "card": card,
            "median": round(statistics.median(runs), 4), "runs": runs,
        }
        for (name, metric, engine), runs in results.runs.items() if (name, engine) not in results.missing
    ]  # fmt: skip


def report(rows: list[dict[str, Any]], results: Results) -> str:
    """The table: a line per workload, metric and engine, and how many times as fast PageTurn is."""
    own = {(r["workload"], r["metric"]): r["median"] for r in rows if r["engine"] == "pageturn"}
    lines = [("workload", "metric", "engine", "median", "unit", "lowest - highest", "PageTurn is")]
    for r in sorted(rows, key=lambda r: list(results.runs).index((r["workload"], r["metric"], r["engine"]))):
        ours, theirs, ratio = own.get((r["workload"], r["metric"])), r["median"], ""
        if ours and theirs and r["engine"] != "pageturn" and r["unit"] != "share":
            ratio = f"{ours / theirs if r['unit'] == 'tok/s' else theirs / ours:.2f}x as fast"
        spread = f"{min(r['runs']):,.4g} - {max(r['runs']):,.4g}"
        lines.append((r["workload"], r["metric"], r["engine"], f"{theirs:,.4g}", r["unit"], spread, ratio))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    for (name, engine), (failed, why) in results.missing.items():
        text.append(f"{name}  {engine}  {'failed' if failed else 'not offered'}: {why}")
    return "\n".join(text)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2] for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0].strip() if names else platform.machine()


def earlier(path: Path) -> dict[str, Any]:
    """What earlier calls left in the file; one line and exit code 2 when that is something else."""
    if not path.parent.is_dir():
        stop(f"{path}: there is no folder {path.parent}")
    if not path.exists():
        return {"versions": {}, "rows": []}
    try:
        content = json.loads(path.read_text())
        return {"date": content["date"], "versions": dict(content["versions"]), "rows": list(content["rows"])}
    except (OSError, ValueError, KeyError, TypeError):
        stop(f"{path} exists and holds no benchmark results; name another file")


def write(path: Path, before: dict[str, Any], new: list[dict[str, Any]], card: str, results: Results) -> None:
    versions = before["versions"] | {"python": platform.python_version()}
    for about in results.about.values():
        versions |= about["versions"]
    host = {
        "system": platform.platform(), "cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "card": card,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }  # fmt: skip
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    content = {"date": date, "host": host, "versions": versions, "rows": before["rows"] + new}
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


# ----------------------------------------------------------------------------------------------- call


def settle(asked: str) -> tuple[str, str, str]:
    """The device and dtype that PageTurn chooses here, and the card's (or the processor's) name."""
    import torch

    from engine.config import EngineConfig
    from engine.device import DeviceManager

    plan = DeviceManager(EngineConfig(device=asked)).resolve()
    on_card = plan.device.type == "cuda"
    card = torch.cuda.get_device_name(plan.device) if on_card else cpu_name()
    return plan.device.type, str(plan.dtype).removeprefix("torch."), card


def make_random(config: str, folder: str, device: str) -> None:
    """Write a model of this folder's config.json with random weights of its own dtype, and no tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shapes = AutoConfig.from_pretrained(config)
    with torch.device(device):
        AutoModelForCausalLM.from_config(shapes, dtype=shapes.dtype).save_pretrained(folder)


def stop(message: str) -> NoReturn:
    print(f"bench.py: {message}", file=sys.stderr)
    sys.exit(2)


def known(what: str, text: str, names: Iterable[str]) -> list[str]:
    asked = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in asked:
        if name not in names:
            stop(f"unknown {what} {name!r}; there are {', '.join(names)}")
    return asked


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PageTurn and its peers on the same work; see the head of bench.py")
    parser.add_argument("--engine", default="pageturn", help=f"comma-separated, of {', '.join(ENGINES)}")
    parser.add_argument("--workload", help="comma-separated names, or all; default: the device's own set")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--model", default="default", help="as for app.py")
    parser.add_argument("--random-weights", action="store_true", help="--model is a folder with a config.json alone")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--runs", type=int, help="runs of each workload, instead of its own number")
    parser.add_argument("--answer-limit", type=float, default=ANSWER_LIMIT_S, metavar="SECONDS",
                        help="an engine that needs longer for one run is ended (default: %(default)g)")  # fmt: skip
    parser.add_argument("--json", type=Path, help="add the results to this file")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE",
                        help="measure nothing; print what --json left in these files as Markdown")  # fmt: skip
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def main(stack: contextlib.ExitStack) -> int:
    o = options()
    if o.worker:
        serve(Setup(**json.loads(o.worker)))
        return 0

    if o.table:
        for path in o.table:
            if not path.exists():
                stop(f"--table {path}: there is no such file")
        print(bench_table.markdown([earlier(path) for path in o.table]))
        return 0
    # Ended in the midst of its work, it ends its engines.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    engines = known("engine", o.engine, ENGINES)
    names = known("workload", o.workload, [*workloads("cpu"), "all"]) if o.workload else None
    if o.runs is not None and o.runs < 1:
        stop(f"--runs {o.runs} must be at least 1")
    before = earlier(o.json) if o.json else {}
    from models import catalog

    try:
        # In a process of its own, so that this one holds none of a card's memory.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            device, dtype, card = pool.submit(settle, o.device).result()
            if o.random_weights:
                path = str(Path(stack.enter_context(tempfile.TemporaryDirectory()), Path(o.model).name))
                pool.submit(make_random, o.model, path, device).result()
            else:
                path = str(catalog.resolve(o.model, device=device))
    except (ValueError, OSError, catalog.ModelUnavailable) as e:
        stop(str(e))
    setup = Setup(path, device, dtype, o.tensor_parallel_size, o.kv_cache_dtype)
    names = list(workloads(device)) if names and "all" in names else names or DEFAULT[device].split()

    results = Results()
    print(f"{Path(path).name} on {card}, {device}, engines {', '.join(engines)}", file=sys.stderr)
    for name in measure(setup, engines, names, o.runs, o.answer_limit, results):
        print(f"  {name} done", file=sys.stderr)
        if o.json:
            write(o.json, before, rows(setup, card, results), card, results)
    print(report(rows(setup, card, results), results))
    return 1 if any(failed for failed, _ in results.missing.values()) else 0


if __name__ == "__main__":
    with contextlib.ExitStack() as until_the_end:
        sys.exit(main(until_the_end))
