"""What bench.py measures: the workloads, each a function of an engine and the number of the run.

A run gives one figure a metric. No two runs share a prompt, so nothing is reused unless the workload says so.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from bench_engines import Engine

UNITS = {
    "decode": "tok/s", "prefill": "tok/s", "throughput": "tok/s", "ttft": "ms", "ready": "s", "first_token": "s",
    "ttft_first_p50": "ms", "ttft_later_p50": "ms", "ttft_later_p95": "ms", "prompt_tokens_cached": "share",
}  # fmt: skip
Figures = dict[str, float]  # metric -> value in its unit


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
    # Made before the clock starts: it takes a tenth of a millisecond, and dozens of turns begin at once.
    prompt = token_ids(system, "system", count, k)
    said = [[token_ids(user, "user", count, k, c, turn) for turn in range(turns)] for c in range(count)]

    async def converse(c: int) -> None:
        nonlocal hit, asked
        history = prompt
        for turn in range(turns):
            history = history + said[c][turn]
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
    """about is what --help says of it; mode is the kind of process that runs it (see Setup); "load" has a new one for
    every run."""

    run: Callable[[Engine, int], Figures]
    about: str
    runs: int = 5
    mode: str = "offline"


def workloads(device: str) -> dict[str, Workload]:
    prompt, long = (128, 256) if device == "cuda" else (256, 128)

    def decodes(batch: int, new: int = 128) -> Workload:
        about = f"new tokens/s of {batch} x {new} after prompts of {prompt}, less the time to the first ones"
        return Workload(partial(decode, batch=batch, prompt=prompt, new=new), about)

    def prefills(count: int, length: int, runs: int) -> Workload:
        about = f"prompt tokens/s of {count} x {length:,} at once, the first new token included"
        return Workload(partial(prefill, count=count, length=length), about, runs)

    def cold(history: int) -> Workload:
        return Workload(partial(ttft, history=history), f"first token of {history:,} tokens never seen before", 7)

    def turn2(history: int, new: int) -> Workload:
        about = f"first token of a history of {history:,} tokens just served and {new} new ones"
        return Workload(partial(ttft, history=history, new=new), about, 7)

    def chats(count: int) -> Workload:
        about = f"{count} x 6 turns (128 tokens asked, 128 answered) over one system prompt of 512, async"
        return Workload(partial(chat, count=count), about, runs=3, mode="chat")

    def threaded(name: str) -> Workload:
        return replace(
            bare[name], about=f"{name} through the engine's thread and one event loop, as the page", mode="chat"
        )

    bare = {
        "decode_b1": decodes(1, long),
        "decode_b8": decodes(8),
        "decode_b32": decodes(32),
        "prefill_1024": prefills(1, 1024, runs=7),
        "prefill_32x1024": prefills(32, 1024, runs=3),
        "ttft_cold": cold(1024),
        "ttft_turn2": turn2(1024, 64),
        "ttft_cold_3584": cold(3584),
        "ttft_turn2_3584_64": turn2(3584, 64),
        "offline_256": Workload(
            offline_256, "new tokens/s of 256 requests of 100-1,024 tokens in and out (nano-vllm's bench)", runs=2
        ),
    }
    return bare | {
        "ttft_turn2_nocache": replace(
            bare["ttft_turn2"],
            about="ttft_turn2 with PageTurn's prefix cache off: what the reuse is worth",
            mode="nocache",
        ),
        **{f"{name}_thread": threaded(name) for name in ("offline_256", "decode_b1", "decode_b32")},
        **{f"chat_{n}": chats(n) for n in (1, 16, 64, 256)},
        "load": Workload(
            first_token, "process start, imports included, to ready and to the first token; files cached", 3, "load"
        ),
    }


DEFAULT = {
    "cpu": "decode_b1 decode_b8 prefill_1024 ttft_cold ttft_turn2 ttft_turn2_nocache load",
    "cuda": "offline_256 decode_b1 decode_b8 decode_b32 ttft_cold_3584 ttft_turn2_3584_64 prefill_32x1024 "
    "chat_1 chat_16 chat_64 chat_256 offline_256_thread decode_b1_thread decode_b32_thread",
}
