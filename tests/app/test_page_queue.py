"""The queue of the page's events: what one client does there must not stop another's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app import page_queue
from app.page_queue import PageQueue
from tests.app.page_port import USER, Port, opened
from tests.app.scripted_engine import Script, ScriptedEngine

OTHER = "1" * 32


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    """Its chats answer a few words and then nothing more for as long as the test runs."""
    async with opened(tmp_path / "data", ScriptedEngine(scripts=[Script("a few words", end="hang")])) as port:
        yield port
        await port.chats.shutdown()


async def answers(port: Port, tab: str = "other") -> bool:
    """Whether somebody else's event is answered soon."""
    async with asyncio.timeout(5):
        message = await port.event(port.number("search"), [OTHER], {"text": "x"}, tab)
    return message["success"]


async def follow(port: Port, chat: str, tab: str) -> int:
    """A tab shows the chat and begins to follow its reply, of which it reads nothing; the status of the answer."""
    shown = await port.event(port.number("pick"), [USER], {"id": chat}, tab)
    assert shown["success"]
    return (await port.join(port.number("follow"), [USER, chat, "0"], {}, tab)).status_code


@pytest.mark.parametrize("session", ["", "x<gradio-sep>y", "a b", "x" * 65, "é"])
async def test_a_session_that_no_page_has_is_refused_and_stops_nobody(port: Port, session: str) -> None:
    refused = await asyncio.gather(*(port.join(port.number("new"), [USER], {}, session) for _ in range(10)))
    assert {(r.status_code, r.json()["detail"]) for r in refused} == {
        (400, "session_hash must be 1 to 64 letters, digits, - or _")
    }
    assert await answers(port)


async def test_sixty_tabs_follow_replies_and_another_s_events_are_answered(port: Port) -> None:
    chat = await port.chats.new_chat(USER)
    await port.chats.send(USER, chat, "Hello")
    assert set(await asyncio.gather(*(follow(port, chat, f"tab{n}") for n in range(60)))) == {200}
    assert await answers(port)


async def test_new_pages_never_push_out_one_that_streams(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_queue, "MAX_SESSIONS", 20)
    chat = await port.chats.new_chat(USER)
    await port.chats.send(USER, chat, "Hello")
    assert await follow(port, chat, "streams") == 200
    for number in range(50):
        assert await answers(port, f"page{number}")
    sessions = port.queue.pending_messages_per_session
    assert "streams" in sessions and len(sessions) <= 20


async def test_pages_that_read_nothing_make_room_after_a_while_and_until_then_new_ones_are_refused(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_queue, "MAX_SESSIONS", 10)
    statuses = [(await port.join(port.number("new"), [USER], {}, f"silent{n}")).status_code for n in range(15)]
    assert statuses == [200] * 10 + [503] * 5
    monkeypatch.setattr(page_queue, "UNREAD_SECONDS", 0.0)
    assert await answers(port)
    assert port.queue.pending_event_ids_session.keys() == {"other"}


async def test_a_page_that_reads_nothing_is_refused_and_one_that_has_read_all_is_not(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_queue, "MAX_UNREAD", 5)
    statuses = [(await port.join(port.number("new"), [USER], {}, "silent")).status_code for _ in range(8)]
    assert statuses == [200] * 5 + [429] * 3
    port.queue.pending_event_ids_session["other"] = {f"broke off {n}" for n in range(9)}
    await port.join(port.number("new"), [OTHER], {}, "other")
    assert len(port.queue.pending_event_ids_session["other"]) == 1


async def test_a_fault_in_the_queue_itself_does_not_end_it(
    port: Port, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = PageQueue.get_events

    def once(self: PageQueue) -> Any:
        monkeypatch.setattr(PageQueue, "get_events", real)
        raise KeyError("a fault of the queue")

    monkeypatch.setattr(PageQueue, "get_events", once)
    assert await answers(port)
    assert "the page's queue broke off" in caplog.text
