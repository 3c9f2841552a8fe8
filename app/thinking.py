"""Splitting a reply into its thinking and its answer, at view time only: the stored text stays whole."""

from __future__ import annotations

from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class ThinkingSplit(NamedTuple):
    """thinking and answer as shown; closed is False while the thinking still runs (or was cut in it)."""

    thinking: str
    answer: str
    closed: bool


def split_thinking(text: str) -> ThinkingSplit:
    """Split `<think>…</think>answer`. Only a `<think>` at the very start opens thinking.

    A text that could still become `<think>` ("<thi") counts as an answer of nothing, so that the tag never
    flickers on the page.
    """
    body = text.lstrip()
    if not body.startswith(OPEN):
        if body and OPEN.startswith(body):
            return ThinkingSplit("", "", True)
        return ThinkingSplit("", text, True)
    thinking, tag, answer = body[len(OPEN) :].partition(CLOSE)
    if tag:
        return ThinkingSplit(thinking.strip(), answer.lstrip("\n"), True)
    return ThinkingSplit(_without_partial_close(thinking).strip(), "", False)


def _without_partial_close(thinking: str) -> str:
    """Drop a tail that may be the beginning of the closing tag."""
    for size in range(len(CLOSE) - 1, 0, -1):
        if thinking.endswith(CLOSE[:size]):
            return thinking[:-size]
    return thinking
