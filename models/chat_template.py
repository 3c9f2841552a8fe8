"""Rendering of a chat template so that nothing a user typed can pass for a special token.

Before rendering, every special-token string inside a message is replaced by a mask: a private-use character
around a random number that the typed text cannot contain. The rendered text is cut at the template's own
special tokens, and only then are the masks taken back, inside pieces that are encoded as plain text.

An assistant message that carries "token_ids" is rendered with marks around its content. Where the content
comes out of the template as it went in, the ids stand in its place; where the template rewrote it (Qwen3 drops
the thoughts of earlier turns), the conversation is rendered again with that message as text.

A last assistant message with "continue": true is not rendered at all: its text or ids follow the generation
prompt of the messages before it, exactly as they did when they were first generated.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MASK = re.compile("\ue000[0-9a-f]{17,40}\ue001")  # as _Masks makes them, and what was typed to look like one


@dataclass(slots=True)
class Masked:
    """Rendered text whose typed special-token strings are still masked."""

    text: str
    masks: dict[str, str]

    def unmask(self, piece: str) -> str:
        """The piece with every mask taken back, in one pass: there may be as many masks as pieces."""
        return _MASK.sub(lambda match: self.masks.get(match.group(), match.group()), piece)


Piece = Masked | list[int]


def render_chat(
    template: str,
    messages: Sequence[dict[str, Any]],
    *,
    special: re.Pattern[str] | None,
    variables: dict[str, str],
    add_generation_prompt: bool,
    template_kwargs: dict[str, Any],
) -> list[Piece]:
    """The conversation as masked text and, in place of contents that brought ids, those ids.

    special finds special-token strings. variables are the template's own, such as "bos_token". Raises
    ValueError for a malformed message, for template_kwargs that would replace one of the variables, or when the
    template refuses the conversation.
    """
    _check(messages)
    for name in variables.keys() & template_kwargs.keys():
        # Templates write these with every message: a long one would make a long prompt of a short request.
        raise ValueError(f"the template's argument {name!r} is the model's own; leave it out")
    nonce = secrets.token_hex(8)
    masks = _Masks(nonce, special)
    tail: list[Piece] = []
    messages = list(messages)
    if messages and messages[-1].get("continue"):
        last = messages.pop()
        ids = last.get("token_ids")
        tail = [list(ids)] if ids is not None else [Masked(masks.hide(last["content"]), masks.originals)]
        add_generation_prompt = True
    marked = {i for i, message in enumerate(messages) if message.get("token_ids") is not None}
    arguments = {**variables, **masks.hide(template_kwargs), "add_generation_prompt": add_generation_prompt}
    arguments.setdefault("tools", None)
    arguments.setdefault("documents", None)
    compiled = _compile(template)
    while True:
        shown = [_shown(message, i if i in marked else None, nonce, masks) for i, message in enumerate(messages)]
        try:
            text = compiled.render(messages=shown, **arguments)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the chat template cannot render this conversation: {error!r}") from error
        kept = {i for i in marked if text.count(shown[i]["content"]) == 1}
        if kept == marked:
            break
        marked = kept
    pieces = _cut(text, [(shown[i]["content"], messages[i]["token_ids"]) for i in sorted(marked)], masks)
    if tail and isinstance(tail[0], Masked) and pieces and isinstance(pieces[-1], Masked):
        # Text on text: encoded jointly, as one string.
        tail[0].text = pieces.pop().text + tail[0].text  # type: ignore[union-attr]
    return pieces + tail


class _Masks:
    """Replaces special-token strings inside values of any depth and remembers what each mask stands for."""

    def __init__(self, nonce: str, special: re.Pattern[str] | None) -> None:
        self.nonce = nonce
        self.special = special
        self.originals: dict[str, str] = {}

    def hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.special.sub(self._mask, value) if self.special else value
        if isinstance(value, dict):
            return {key: self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, (list, tuple)) else value

    def _mask(self, match: re.Match[str]) -> str:
        mask = f"\ue000{self.nonce}{len(self.originals)}\ue001"
        self.originals[mask] = match.group()
        return mask


def _shown(message: dict[str, Any], mark: int | None, nonce: str, masks: _Masks) -> dict[str, Any]:
    """The message as the template sees it."""
    shown = {key: masks.hide(value) for key, value in message.items() if key not in ("token_ids", "continue")}
    if mark is not None:
        shown["content"] = f"\ue002{nonce}{mark}\ue003{shown['content']}\ue004{nonce}{mark}\ue005"
    return shown


def _cut(text: str, marked: list[tuple[str, list[int]]], masks: _Masks) -> list[Piece]:
    """Replaces each (marked content, its ids), which the text holds in this order, by the ids."""
    pieces: list[Piece] = []
    for content, ids in marked:
        before, _, text = text.partition(content)
        if before:
            pieces.append(Masked(before, masks.originals))
        pieces.append(list(ids))
    if text:
        pieces.append(Masked(text, masks.originals))
    return pieces


def _check(messages: Sequence[dict[str, Any]]) -> None:
    if not messages:
        raise ValueError("messages is empty; a conversation needs at least one message")
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ValueError(f"messages[{index}].role is {role!r}; it must be a string such as 'user'")
        if not isinstance(content, str):
            raise ValueError(f"messages[{index}].content is {type(content).__name__}; it must be a string")
        if message.get("token_ids") is not None and role != "assistant":
            raise ValueError(f"messages[{index}] has token_ids but role {role!r}; only assistant messages carry ids")
        if message.get("continue") and (role != "assistant" or index != len(messages) - 1):
            raise ValueError(f"messages[{index}] has 'continue'; only a last assistant message can be continued")


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the model's chat template is not valid Jinja: {error} (line {error.lineno})") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """Jinja's own tojson escapes for HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
