"""Exported chats from anywhere: what comes in is checked field by field (what comes out again: test_chat.py)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.chat import ChatService
from app.portable import FORMAT, from_portable
from app.store import Store
from engine.engine_thread import QueueFull
from tests.app.scripted_engine import Script, ScriptedEngine

ASKED = {"parent": None, "role": "user", "text": "q"}
ANSWERED = {"parent": 0, "role": "assistant", "text": "a"}


def exported(*turns: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {"format": FORMAT, "version": 1, "title": "t", "settings": {}, "turns": list(turns), "open": None} | other


@pytest.mark.parametrize("version", [True, 1.0, "1", None, 0, 2])
def test_another_version_is_refused_also_where_it_equals_ours(version):
    with pytest.raises(ValueError, match="version"):
        from_portable(exported(version=version))
    assert from_portable(exported())[0] == "t"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("created", True),
        ("created", float("nan")),
        ("parent", False),
        ("parent", 0.0),
        ("status", ["done"]),
        ("text", 1),
    ],
)
def test_no_field_of_a_turn_takes_a_value_of_another_kind(field, value):
    assert len(from_portable(exported(ASKED, ANSWERED))[2]) == 2
    with pytest.raises(ValueError, match=field):
        from_portable(exported(ASKED, ANSWERED | {field: value}))


@pytest.mark.parametrize(
    "settings", [{"max_tokens": True}, {"top_k": True}, {"seed": False}, {"thinking": 1}, {"temperature": True}]
)
def test_no_setting_takes_a_value_of_another_kind(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        from_portable(exported(settings=settings))


def test_the_open_turn_is_a_position():
    assert from_portable(exported(ASKED, ANSWERED, open=1))[3] == 1
    for leaf in (False, 0.0, "0", 2):
        with pytest.raises(ValueError, match="open"):
            from_portable(exported(ASKED, ANSWERED, open=leaf))


def test_the_newest_leaf_below_the_open_turn_is_opened():
    asked, answered = ASKED | {"parent": 1}, ANSWERED | {"parent": 2}
    turns = [ASKED, ANSWERED, asked, answered, answered, ASKED, ANSWERED | {"parent": 5}]
    leaves = [from_portable(exported(*turns, open=position))[3] for position in range(len(turns))]
    assert leaves == [4, 4, 4, 3, 4, 6, 6]
    assert from_portable(exported(*turns))[3] is None


@pytest.mark.parametrize("open_turn", [0, 1, 2, None])
def test_a_message_without_a_reply_is_refused(open_turn):
    """Whichever branch is open, it could be opened later, and the next message would stand under this one."""
    with pytest.raises(ValueError, match=r'turns\[2\] has "role" "user" and no reply.*"parent" 2 .*or leave it out'):
        from_portable(exported(ASKED, ANSWERED, ASKED | {"parent": 1}, open=open_turn))


async def test_whatever_becomes_of_a_reply_the_chat_s_export_comes_in_again(tmp_path):
    store = Store(tmp_path)
    engine = ScriptedEngine(scripts=[Script(end="error"), Script("", end="hang"), Script(end="hang"), Script()])
    chats = ChatService(store, engine)
    chat = await chats.new_chat("ann")

    async def comes_in_again() -> None:
        data = json.loads(json.dumps(await chats.export_chat("ann", chat)))
        copy = await chats.import_chat("ann", data)
        here, there = await chats.open_chat("ann", chat), await chats.open_chat("ann", copy)
        assert [(t.role, t.text) for t in there.turns] == [(t.role, t.text) for t in here.turns]

    await comes_in_again()  # empty
    engine.refuse = QueueFull("full")
    with pytest.raises(ValueError, match="full"):
        await chats.send("ann", chat, "refused")
    await comes_in_again()
    engine.refuse = None
    await (await chats.send("ann", chat, "q1")).wait()  # fails
    await comes_in_again()
    job = await chats.send("ann", chat, "q2")  # runs, and is stopped before it says anything
    await comes_in_again()
    await chats.stop("ann", chat)
    await job.wait()
    await comes_in_again()
    await chats.edit("ann", chat, (await chats.open_chat("ann", chat)).turns[2].id, "q2 anew")
    await chats.shutdown()  # cuts it
    await comes_in_again()
    store.close()


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "data",
    [
        exported(version=LONG),
        exported(open=LONG),
        exported(settings={LONG: 1}),
        exported(settings={"stop": LONG}),
        *(exported(ASKED | {field: LONG}) for field in ("parent", "role", "status", "created")),
    ],
    ids=lambda _: "",
)
def test_a_refusal_is_not_as_long_as_what_it_refuses(data):
    with pytest.raises(ValueError, match="…") as caught:
        from_portable(data)
    assert len(str(caught.value)) < 400
