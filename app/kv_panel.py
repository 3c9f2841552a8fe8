"""The live panel on the page: its component, and the open chat's figures that it shows beside the live ones.

What changes by itself (blocks, rates, events) reaches the panel over the socket of app/kv_hub.py. What belongs to the
open chat comes as the component's value, JSON made here:

    {"owner": int,                     the chat's slot on KV blocks: tells "mine" from all others (page.js knows the
                                       slots of the reader's other chats from the list of chats)
     "context_used": int | null, "context_limit": int,   tokens; null where not known, limit 0 while no model is loaded
     "turns": [{"n": int,              the how-manieth reply of the branch, from 1
                "at": float,           seconds since the epoch
                "ttft": float, "rate": float,     seconds, tokens/s
                "prompt": int, "cached": int, "out": int, "block_size": int,   tokens
                "without": float | null}, ...],   estimated TTFT with nothing cached; null: unknown
     "ended": int}                     only in a value that makes the page ask how a followed reply ended
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from app.chat import ChatView, Figures, JobSnapshot

ASSETS = Path(__file__).parent / "assets"
TURNS_SENT = 20


def kv_panel() -> gr.HTML:
    """The panel's component. Its template holds no value, so that an update never wipes the canvas."""
    return gr.HTML(
        value=panel_value(None),
        elem_id="kv-panel",
        html_template=(ASSETS / "panel.html").read_text(encoding="utf-8"),
        js_on_load="window.pageturn.mountPanel(element, watch, props)",
        apply_default_css=False,
    )


def panel_value(
    view: ChatView | None, snapshot: JobSnapshot | None = None, prefill_rate: float = 0.0
) -> dict[str, Any]:
    """The component's value for an open chat (None: a new one). `snapshot` stands for its running reply;
    `prefill_rate` (tokens/s, as the engine measured it; 0: not yet) gives the estimate without the cache."""
    if view is None:
        return {"owner": 0, "context_used": 0, "context_limit": 0, "turns": []}
    replies = [turn for turn in view.turns if turn.role == "assistant"]
    first = max(0, len(replies) - TURNS_SENT)
    known = []
    for n, turn in enumerate(replies[first:], start=first + 1):
        live = snapshot is not None and snapshot.turn_id == turn.id
        figures = snapshot.figures if live and snapshot is not None else turn.figures
        if figures is not None:
            known.append((n, turn.created, figures))
    turns = [_turn(n, created, figures, prefill_rate) for n, created, figures in known]
    used = view.context_used
    if snapshot is not None and turns:
        used = max(used or 0, turns[-1]["prompt"] + turns[-1]["out"])
    return {"owner": view.owner, "context_used": used, "context_limit": view.context_limit, "turns": turns}


def _turn(n: int, created: float, figures: Figures, prefill_rate: float) -> dict[str, Any]:
    is_known = figures.ttft > 0 and prefill_rate > 0
    return {
        "n": n,
        "at": created,
        "ttft": figures.ttft,
        "rate": figures.decode_rate,
        "prompt": figures.prompt_tokens,
        "cached": figures.cached_tokens,
        "out": figures.output_tokens,
        "block_size": figures.block_size,
        # What it took, and what computing the cached tokens would have taken on top.
        "without": figures.ttft + figures.cached_tokens / prefill_rate if is_known else None,
    }
