"""The form of a chat's settings: its controls, and the way between their values and ChatSettings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import gradio as gr

from app.chat import ChatSettings
from engine.shown import shown

# The order of the controls is the order of the form's values.
FIELDS = (
    "system_prompt",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "seed",
    "stop",
    "thinking",
    "leave_out_older",
)
_OPTIONAL = ("max_tokens", "seed")
_INTEGER = ("top_k", "max_tokens", "seed")
# What would end a line where every line is a stop string, and what says so: \n, \r, or \u and four hexadecimal digits.
_TO_ESCAPE = re.compile(r"[\\\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_ESCAPE = re.compile(r"\\(?:([\\nr])|u([0-9a-fA-F]{4}))")
_ESCAPED = {"\\": "\\", "\n": "n", "\r": "r"}
_UNESCAPED = {letter: char for char, letter in _ESCAPED.items()}

PRESETS = {
    "The model's own": "",
    "Brief": "Answer in one or two short sentences.",
    "Teacher": "You are a patient teacher. Explain step by step, with a small example.",
    "Programmer": "You are an experienced programmer. Answer with code first, then one short explanation.",
    "Translator": "Translate what the user writes into English. Answer with the translation only.",
}


def build_form() -> tuple[gr.Dropdown, list[Any]]:
    """Create the controls in the present layout; returns the preset list and the controls in FIELDS' order."""
    preset = gr.Dropdown(list(PRESETS), value=None, label="System prompt preset", elem_id="preset")
    controls = [
        gr.Textbox(label="System prompt", lines=2, max_lines=8, elem_id="system-prompt"),
        gr.Slider(0, 2, step=0.05, label="Temperature (0: always the likeliest token)", elem_id="temperature"),
        gr.Slider(0, 1, step=0.01, label="Top-p", elem_id="top-p"),
        gr.Number(precision=0, label="Top-k (0: all)", elem_id="top-k"),
        gr.Slider(0, 1, step=0.01, label="Min-p", elem_id="min-p"),
        gr.Slider(0.5, 2, step=0.01, label="Repetition penalty", elem_id="repetition-penalty"),
        gr.Slider(-2, 2, step=0.05, label="Presence penalty", elem_id="presence-penalty"),
        gr.Slider(-2, 2, step=0.05, label="Frequency penalty", elem_id="frequency-penalty"),
        gr.Textbox(label="Max tokens (empty: the rest of the context)", max_lines=1, elem_id="max-tokens"),
        gr.Textbox(label="Seed (empty: another one each time)", max_lines=1, elem_id="seed"),
        gr.Textbox(
            label=r"Stop strings, one a line (\n: a line break, \\: a backslash)",
            lines=1,
            max_lines=4,
            elem_id="stop-strings",
        ),
        gr.Checkbox(label="Thinking, where the model can", elem_id="thinking"),
        gr.Checkbox(label="Leave out older turns when the context is full", elem_id="leave-out-older"),
    ]
    return preset, controls


def show_form(settings: ChatSettings) -> list[Any]:
    """The controls' values for these settings."""
    values = []
    for name in FIELDS:
        value = getattr(settings, name)
        if name in _OPTIONAL:
            value = "" if value is None else str(value)
        elif name == "stop":
            value = "\n".join(_escaped(text) for text in value)
        values.append(value)
    return values


def is_unfilled(values: Sequence[Any]) -> bool:
    """True for the form as the browser has it before the server has filled it in: a message can be quicker."""
    form = dict(zip(FIELDS, values, strict=False))
    return form.get("top_k") is None and not form.get("temperature") and not form.get("top_p")


def left_alone(values: Sequence[Any], settings: ChatSettings) -> set[int]:
    """Indices of the controls that stand as show_form(settings) has them."""
    return {i for i, (value, shown) in enumerate(zip(values, show_form(settings), strict=False)) if value == shown}


def read_form(values: Sequence[Any], defaults: ChatSettings) -> ChatSettings:
    """Settings from the controls' values. A value that is no setting raises ValueError naming field and value."""
    if len(values) != len(FIELDS):
        raise ValueError(f"the form has {len(FIELDS)} values, {len(values)} came: reload the page")
    changes: dict[str, Any] = {}
    for name, value in zip(FIELDS, values, strict=True):
        if name == "stop":
            value = tuple(_unescaped(line) for line in str(value or "").splitlines() if line)
        elif name in _OPTIONAL and not str("" if value is None else value).strip():
            value = None
        elif name == "top_k" and value is None:  # cleared
            value = 0
        elif name in _INTEGER:
            value = _integer(name, value)
        changes[name] = value
    return defaults.changed(changes)


def _escaped(text: str) -> str:
    """A stop string as a line of the form."""
    return _TO_ESCAPE.sub(lambda match: "\\" + (_ESCAPED.get(match[0]) or f"u{ord(match[0]):04x}"), text)


def _unescaped(line: str) -> str:
    """The stop string that a line of the form stands for. A backslash before anything else is a backslash."""
    return _ESCAPE.sub(lambda match: _UNESCAPED[match[1]] if match[1] else chr(int(match[2], 16)), line)


def _integer(name: str, value: Any) -> int:
    try:
        return int(str(value).strip())
    except ValueError:
        raise ValueError(f"{name}={shown(value)} must be a whole number") from None
