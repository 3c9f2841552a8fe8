"""What bench.py has measured, as tables in Markdown: PageTurn beside its peers, the ratio, its goal and the bound.

A ratio is PageTurn's median over the peer's, so that rates want a high one and times a low one.
"""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

# Ratios to vLLM that the project has set itself, with bf16 weights and KV and without speculation: by ranks, workload
# and metric. Rates are to reach them, times to stay below.
GOALS = {
    1: {
        ("offline_256", "throughput"): 1.2,
        ("decode_b1", "decode"): 2.0, ("decode_b8", "decode"): 2.0, ("decode_b32", "decode"): 1.8,
        ("ttft_cold_3584", "ttft"): 0.6, ("ttft_turn2_3584_64", "ttft"): 0.3,
        ("prefill_32x1024", "prefill"): 1.4,
        ("chat_1", "throughput"): 2.0, ("chat_16", "throughput"): 1.5, ("chat_64", "throughput"): 1.5,
        ("chat_256", "throughput"): 1.4,
        **{(f"chat_{n}", "ttft_later_p50"): 0.3 for n in (1, 16, 64, 256)},
    },
    2: {("offline_256", "throughput"): 1.2, ("decode_b1", "decode"): 2.0},
}  # fmt: skip
THREAD = "_thread"
THREAD_GOAL = 0.97  # of the bare engine
# What one card can do at best with Qwen3-0.6B's shapes in bf16, by its measured 4.3 TB/s and 790 TFLOP/s: weights and
# KV are read once a step, and matrix products are all that is computed. Units as in the rows.
BOUNDS = {
    ("NVIDIA H200", "qwen3-0.6b", 1): {
        "offline_256": 34_500, "decode_b1": 3_600, "decode_b8": 26_000, "decode_b32": 90_000,
        "ttft_cold_3584": 7.3, "ttft_turn2_3584_64": 0.4, "prefill_32x1024": 600_000,
    },
}  # fmt: skip


def markdown(results: list[dict[str, Any]]) -> str:
    """Of several files' contents, where one engine's row is there twice the last one counts. A section for each card,
    model, number of ranks, dtype and type of the KV cache."""
    sections: dict[tuple[Any, ...], dict[tuple[str, str], dict[str, Row]]] = {}
    for row in (row for content in results for row in content["rows"]):
        section = sections.setdefault(tuple(row[key] for key in ("card", "model", "tp", "kv_dtype")), {})
        section.setdefault((row["workload"], row["metric"]), {})[row["engine"]] = row
    told: dict[str, set[str]] = {}
    for content in results:
        for package, version in content["versions"].items():
            told.setdefault(package, set()).add(version)
    versions = ", ".join(f"{package} {' and '.join(sorted(found))}" for package, found in sorted(told.items()))
    dates = sorted({str(content.get("date", ""))[:10] for content in results})
    parts = []
    for (card, model, tp, kv_dtype), table in sections.items():
        dtypes = sorted({f"{name}: {row['dtype']}" for rows in table.values() for name, row in rows.items()})
        count = "" if tp == 1 else f"{tp} x "
        parts.append(
            f"{count}{card}, {model}, {'; '.join(dtypes)}; KV cache {kv_dtype}; {versions}; {' and '.join(dates)}."
        )
        bare = {key: rows for key, rows in table.items() if not key[0].endswith(THREAD)}
        parts.append(_peers(bare, GOALS.get(tp, {}), BOUNDS.get((card, model, tp), {})))
        if threads := {key: rows for key, rows in table.items() if key not in bare}:
            parts.append(_threads(threads, bare))
    return "\n\n".join(parts)


def _peers(
    table: dict[tuple[str, str], dict[str, Row]], goals: dict[tuple[str, str], float], bounds: dict[str, float]
) -> str:
    peers = list(dict.fromkeys(name for rows in table.values() for name in rows if name != "pageturn"))
    head = ["", "PageTurn", *(cell for peer in peers for cell in (peer, f"ratio to {peer}")), "goal", "bound"]
    lines = [head]
    for key, rows in table.items():
        row = next(iter(rows.values()))
        ours = rows.get("pageturn")
        cells = [_label(*key, row["unit"]), _figure(ours)]
        for peer in peers:
            cells += [_figure(rows.get(peer)), _ratio(ours, rows.get(peer))]
        goal, is_rate = goals.get(key), row["unit"] == "tok/s"
        cells.append("" if goal is None else f"{'≥' if is_rate else '≤'} {goal:g}x{_verdict(rows, goal, is_rate)}")
        bound = bounds.get(key[0])
        cells.append("" if bound is None else f"{bound:,g}")
        lines.append(cells)
    return _table(lines)


def _threads(table: dict[tuple[str, str], dict[str, Row]], bare: dict[tuple[str, str], dict[str, Row]]) -> str:
    lines = [["", "bare engine", "through its thread", "share", "goal"]]
    for (workload, metric), rows in table.items():
        for name, row in rows.items():
            alone = bare.get((workload.removesuffix(THREAD), metric), {}).get(name)
            label = _label(workload.removesuffix(THREAD), metric, row["unit"])
            share = "" if alone is None else f"{row['median'] / alone['median']:.3f}"
            lines.append([label, _figure(alone), _figure(row), share, f"≥ {THREAD_GOAL}"])
    return _table(lines)


def _verdict(rows: dict[str, Row], goal: float, is_rate: bool) -> str:
    if "pageturn" not in rows or "vllm" not in rows:
        return ""
    ratio = rows["pageturn"]["median"] / rows["vllm"]["median"]
    return " (met)" if (ratio >= goal if is_rate else ratio <= goal) else " (short)"


def _label(workload: str, metric: str, unit: str) -> str:
    plain = metric in ("decode", "prefill", "throughput", "ttft")
    return f"{workload}{'' if plain else ', ' + metric} ({unit})"


def _figure(row: Row | None) -> str:
    if row is None:
        return "-"
    value = row["median"]
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _ratio(ours: Row | None, theirs: Row | None) -> str:
    if ours is None or theirs is None or ours["unit"] == "share" or not theirs["median"]:
        return ""
    return f"{ours['median'] / theirs['median']:.2f}x"


def _table(lines: list[list[str]]) -> str:
    head, *body = ("| " + " | ".join(cells) + " |" for cells in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])
