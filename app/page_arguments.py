"""Checks of what a page's event brings: the endpoints behind the page are open to anything that can reach the port."""

from __future__ import annotations

import re
from typing import Any

import gradio as gr

USER_ID = re.compile(r"[0-9a-f]{32}")


def identity(request: gr.Request, user: object, login: bool) -> str:
    """The user's identity: with `login` the name they logged in by, else the browser's random 128-bit id."""
    if login:
        if not request.username:
            raise gr.Error("Log in first.", print_exception=False)
        return f"login:{request.username}"
    if not isinstance(user, str) or not USER_ID.fullmatch(user):
        raise gr.Error("This browser sent no valid id: reload the page.", print_exception=False)
    return user


def as_text(value: object) -> str:
    """An argument that must be text; none at all is ""."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise gr.Error(f"{value!r} is not text", print_exception=False)
    return value


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
        raise gr.Error(f"{value!r} is not a turn of a chat", print_exception=False) from None
