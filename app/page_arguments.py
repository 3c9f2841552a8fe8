"""Checks of what a page's event brings: the endpoints behind the page are open to anything that can reach the port."""

from __future__ import annotations

import re
from typing import Any

import gradio as gr

from app.text import storable
from engine.shown import shown

# A browser's id, and behind it how often its reader has turned to a chat in this tab.
_USER = re.compile(r"([0-9a-f]{32})(?::([0-9]{1,9}))?")


def identity(request: gr.Request, user: object, login: bool) -> str:
    """The user's identity: with `login` the name they logged in by, else the browser's random 128-bit id."""
    if login:
        if not request.username:
            raise gr.Error("Log in first.", print_exception=False)
        return f"login:{request.username}"
    if not isinstance(user, str) or not (match := _USER.fullmatch(user)):
        raise gr.Error("This browser sent no valid id: reload the page.", print_exception=False)
    return match[1]


def choice_of(user: object) -> int:
    """How often the reader has turned to a chat, as the page says it with the user's id; 0 where it does not."""
    match = _USER.fullmatch(user) if isinstance(user, str) else None
    return int(match[2] or 0) if match else 0


def as_text(value: object) -> str:
    """An argument that must be text, as UTF-8 can hold it; none at all is ""."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise gr.Error(f"{shown(value)} is not text", print_exception=False)
    return storable(value)


def event_field(event: gr.EventData, name: str) -> Any:
    """What a component's event says under `name`."""
    try:
        return getattr(event, name)
    except (AttributeError, KeyError, TypeError):  # an event without data, or with data of another shape
        raise gr.Error(f"the event names no {name}", print_exception=False) from None


def as_message(value: Any) -> str:
    """The text of a Chatbot message: a string, or a list of text parts."""
    if isinstance(value, list):
        return "".join(as_text(part.get("text")) if isinstance(part, dict) else as_text(part) for part in value)
    return as_text(value)


def as_turn_id(value: object) -> int:
    """The id of a turn; 0 for none."""
    try:
        return int(value or 0)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        raise gr.Error(f"{shown(value)} is not a turn of a chat", print_exception=False) from None
