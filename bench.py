"""The benchmarks: python bench.py [--engine pageturn,transformers,...] [--workload NAME,...|all] [--json FILE]

Every engine runs in a process of its own and does the same work on the same token ids, at temperature 0.6 and
with the end-of-sequence token ignored. On a CPU the engines take turns run by run, so that a noisy machine hits
all of them alike; on a GPU, where each wants the memory for itself, one engine follows the other.

    python bench.py --table FILE...    what --json has left there as tables in Markdown, with the goals and bounds

The table and the JSON give the median of a workload's runs, the JSON all of them too. --help tells what each workload
does. bench_workloads.py has what is measured, bench_engines.py who, bench_workers.py the processes, bench_table.py the
tables in Markdown; this file the call and its report.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

import bench_table
from bench_engines import ENGINES, Setup
from bench_workers import Results, measure
from bench_workloads import DEFAULT, UNITS, workloads

ANSWER_LIMIT_S = 1800.0  # an engine that needs longer for one run is taken for hung


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


def listing() -> str:
    """Every workload with what it does, where that differs by device for each; in the table's order."""
    cpu, cuda = workloads("cpu"), workloads("cuda")
    lines = ["workloads (* in the CPU's own set, + in the GPU's):"]
    for name, workload in cpu.items():
        own = ("*" if name in DEFAULT["cpu"].split() else " ") + ("+" if name in DEFAULT["cuda"].split() else " ")
        lines.append(f"  {name:19}{own} {workload.about}")
        if cuda[name].about != workload.about:
            lines.append(f"{'GPU:':>23} {cuda[name].about}")
    return "\n".join(lines)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="PageTurn and its peers on the same work; the head of bench.py says how it is measured.",
        epilog=listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engine", default="pageturn", help=f"comma-separated, of {', '.join(ENGINES)}")
    parser.add_argument(
        "--workload", help="comma-separated names of those below, or all; default: the device's own set"
    )
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
    return parser.parse_args()


def main(stack: contextlib.ExitStack) -> int:
    o = options()
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
