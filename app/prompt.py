"""Prompt: the ids that a branch of turns becomes, and how they compare with what was stored before.

Stored ids stand verbatim where tokenizer and template are the ones they were made with, so that the engine finds
every block of earlier turns again; only what is new is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from app.chat_settings import ChatSettings
from app.errors import ContextFull
from app.records import TurnRow, full_ids

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer

MAX_UNSEEN_IDS = 64


@dataclass(slots=True)
class Prompt:
    """A prompt and its comparison with the branch's stored ids.

    ids             what the engine gets
    reply_ids       the tail of `ids` that is an earlier part of the reply itself ("continue"), usually []
    common, suffix  ids == stored[:common] + suffix + reply_ids, where stored are the ids up to the reply before
    reused_prefix, stored_before, diverged_at, diverged_token, left_out, encoded_anew: as in Figures
    """

    ids: list[int]
    reply_ids: list[int]
    common: int
    suffix: list[int]
    reused_prefix: int
    stored_before: int
    diverged_at: int | None = None
    diverged_token: str | None = None
    left_out: int = 0
    encoded_anew: int = 0


def build_prompt(
    tokenizer: Tokenizer,
    branch: Sequence[TurnRow],
    settings: ChatSettings,
    limit: int,
    unfinished: TurnRow | None = None,
) -> Prompt:
    """The prompt that answers `branch` (root first, the last turn a user's), or goes on with its `unfinished` reply.

    limit: tokens that prompt and output may take together. Raises ContextFull where the prompt leaves no room for
    one token; with settings.leave_out_older the oldest turns are dropped first.
    """
    least = tokenizer.least_tokens(branch[-1].text, limit) if branch else 0
    if least >= limit:
        words = f"This message takes at least {least:,} tokens and the context holds {limit:,}: shorten it"
        raise ContextFull(words, least, limit)
    # A reply that ended stands with every id it has, so that all its blocks are found again.
    branch = [without_unseen_ids(turn, tokenizer) if turn.status == "cut" else turn for turn in branch]
    reply_ids: list[int] = []
    if unfinished is not None:
        unfinished = without_unseen_ids(unfinished, tokenizer)
        if unfinished.fingerprint == tokenizer.fingerprint:
            reply_ids = list(unfinished.reply)
        else:
            reply_ids = tokenizer.encode(unfinished.text)
    template_kwargs = None if settings.thinking else {"enable_thinking": False}

    def encode(skip: int) -> list[int]:
        messages = _messages(tokenizer, branch[skip:], settings.system_prompt)
        return tokenizer.encode_chat(messages, template_kwargs=template_kwargs) + reply_ids

    ids, left_out = _fit(encode, branch, settings, limit)
    before = _stored_ids(tokenizer, branch)
    common = _common_prefix(ids[: len(ids) - len(reply_ids)], before)
    stored = before if unfinished is None else _stored_ids(tokenizer, [*branch, unfinished])
    reused = _common_prefix(ids, stored)
    diverged = reused < len(stored)
    return Prompt(
        ids=ids,
        reply_ids=reply_ids,
        common=common,
        suffix=ids[common : len(ids) - len(reply_ids)],
        reused_prefix=reused,
        stored_before=len(stored),
        diverged_at=reused if diverged else None,
        diverged_token=tokenizer.decode(ids[reused : reused + 1], skip_special_tokens=False) if diverged else None,
        left_out=left_out,
        encoded_anew=sum(
            turn.role == "assistant" and turn.text != "" and turn.fingerprint != tokenizer.fingerprint
            for turn in [*branch[left_out:], *([unfinished] if unfinished else [])]
        ),
    )


def without_unseen_ids(turn: TurnRow, tokenizer: Tokenizer) -> TurnRow:
    """The reply without trailing ids whose text was held back and never shown: half a character, and where the server
    died in mid-reply also the beginning of a stop string. Going on from them would lose the character."""
    if turn.role != "assistant" or turn.fingerprint != tokenizer.fingerprint:
        return turn
    for dropped in range(min(MAX_UNSEEN_IDS, len(turn.reply)) + 1):
        ids = turn.reply[: len(turn.reply) - dropped]
        if len(tokenizer.decode(ids)) <= len(turn.text):
            return replace(turn, reply=ids)
    return turn


def _messages(tokenizer: Tokenizer, branch: Sequence[TurnRow], system_prompt: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if system_prompt.strip():
        messages.append({"role": "system", "content": system_prompt})
    for turn in branch:
        message: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.role == "assistant" and turn.fingerprint == tokenizer.fingerprint:
            message["token_ids"] = list(turn.reply)
        messages.append(message)
    return messages


def _fit(
    encode: Callable[[int], list[int]], branch: Sequence[TurnRow], settings: ChatSettings, limit: int
) -> tuple[list[int], int]:
    """(ids, how many of the oldest turns are left out): the least that must be, or as in the reply before.

    Leaving out shifts everything after it and so costs a cold prefill. Hence once it is needed, the prompt shrinks to
    half the context, and the same turns stay out until it is full again.
    """
    ids = encode(0)
    if not settings.leave_out_older:
        if len(ids) >= limit:
            way_on = "shorten the message"
            if len(branch) > 1:
                way_on = f"start a new chat, {way_on}, or tick “Leave out older turns” in the settings"
            words = f"This chat takes {len(ids):,} tokens and the context holds {limit:,}: {way_on}"
            raise ContextFull(words, len(ids), limit)
        return ids, 0
    room = min(settings.max_tokens or limit, limit // 4)
    if len(ids) + room <= limit:
        return ids, 0
    # A turn and its answer go together; the last turn stays.
    choices = range(0, len(branch), 2)
    before = next((t.figures["left_out"] for t in reversed(branch) if t.figures and "left_out" in t.figures), 0)
    if before in choices and before > 0:
        ids = encode(before)
        if len(ids) + room <= limit:
            return ids, before
    low, high = 1, len(choices) - 1
    while low < high:
        middle = (low + high) // 2
        if len(encode(choices[middle])) <= limit // 2:
            high = middle
        else:
            low = middle + 1
    left_out = choices[min(low, len(choices) - 1)]
    ids = encode(left_out)
    if len(ids) >= limit:
        raise ContextFull(
            f"Even without older turns this message takes {len(ids):,} tokens and the context holds {limit:,}: "
            "shorten it",
            len(ids),
            limit,
        )
    return ids, left_out


def _stored_ids(tokenizer: Tokenizer, branch: Sequence[TurnRow]) -> list[int]:
    """All ids of the branch up to its last reply; [] where that reply was written with another tokenizer."""
    last = next((turn for turn in reversed(branch) if turn.role == "assistant"), None)
    return full_ids(branch) if last is not None and last.fingerprint == tokenizer.fingerprint else []


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
