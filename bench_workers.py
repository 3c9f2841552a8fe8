"""The processes of bench.py: one for each engine, and the order in which they take their turns.

Called as a program, with a Setup in JSON, this file is such a process; the rest of it is the parent's end.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench_engines import ENGINES, Engine, NotOffered, Setup
from bench_workloads import Figures, chat, token_ids, workloads


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
            [sys.executable, __file__, json.dumps(asdict(setup))], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.log, start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        """The process's next answer. Raises Failed or NotOffered."""
        assert self.process.stdout
        watchdog = threading.Timer(self.limit, self.kill)
        watchdog.daemon = True  # ended in its midst, or while this starts, the program would live on until the limit
        watchdog.start()
        try:
            line = self.process.stdout.readline()
        finally:
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
        finally:
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


if __name__ == "__main__":
    serve(Setup(**json.loads(sys.argv[1])))
