"""A disk that is full when a reply ends: the reply stays whole in memory and on the page until it is on disk."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from typing import Any

import pytest

from app import chat_view, unsaved
from app.chat import ChatNotFound, ChatService, JobSnapshot, ReplyUnsaved
from app.figures import Figures
from app.page_show import Showing
from app.store import Store
from tests.app.scripted_engine import Script, ScriptedEngine
from tests.app.test_page_show import TAB, page_parts

TEXT = "All that the engine said. " * 150  # with its ids 20 KB: it does not fit into pages that are there already
FULL = "database or disk is full"


class Disk:
    """The database's disk, which can be full: SQLite then refuses what needs one more page, as for a full disk."""

    def __init__(self, store: Store) -> None:
        self._db = store._db

    def fill(self) -> None:
        self._limit(self._db.read(lambda db: db.execute("PRAGMA page_count").fetchone()[0]))

    def free(self) -> None:
        self._limit(1 << 30)

    def _limit(self, pages: int) -> None:
        self._db.write(lambda db: db.execute(f"PRAGMA max_page_count={pages}").fetchone()).result()


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def disk(store) -> Disk:
    return Disk(store)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(scripts=[Script(TEXT, first=0.05)], max_model_len=50_000)


@pytest.fixture
def retry_every(monkeypatch):
    """retry_every(seconds): how often an unsaved reply is tried again by itself."""

    def retry_every(seconds: float) -> None:
        monkeypatch.setattr(unsaved, "RETRY_EVERY_S", seconds)

    retry_every(3600)
    return retry_every


@pytest.fixture
async def ended(store, disk, engine, retry_every) -> tuple[ChatService, str, int]:
    """(chats, a chat, its reply's turn): the disk was full when the reply ended, and still is."""
    chats = ChatService(store, engine)
    chat = await chats.new_chat("ann")
    job = await chats.send("ann", chat, "q")
    disk.fill()
    final = await asyncio.wait_for(job.wait(), 10)
    assert final.done and FULL in final.unsaved
    return chats, chat, job.turn_id


async def stored(store: Store, chat: str) -> tuple[str, str]:
    turn = (await store.path("ann", chat, (await store.chat("ann", chat)).leaf))[-1]
    return turn.text, turn.status


async def test_a_reply_that_a_full_disk_did_not_take_is_shown_and_exported_whole(store, ended):
    chats, chat, _ = ended
    assert (await stored(store, chat))[1] == "running"
    view = await chats.open_chat("ann", chat)
    turn = view.turns[-1]
    assert (turn.text, turn.status, turn.can_continue) == (TEXT, "done", False)
    assert turn.line.endswith("end of turn") and turn.figures.output_tokens > 3000
    assert FULL in turn.unsaved and view.job is None and view.unsaved is not None
    assert view.context_used > turn.figures.output_tokens
    exported = (await chats.export_chat("ann", chat))["turns"][-1]
    assert (exported["text"], exported["status"]) == (TEXT, "done")
    page = json.dumps(chat_view.render(view).messages)
    assert f"not on disk yet: {FULL}; it is saved as soon as there is room" in page and "end of turn" in page


async def test_nobody_else_learns_of_it(ended):
    chats, chat, _ = ended
    assert chats.unsaved("ann", chat) is not None and chats.unsaved("bob", chat) is None
    with pytest.raises(ChatNotFound):
        await chats.open_chat("bob", chat)
    with pytest.raises(ChatNotFound):
        await chats.send("bob", chat, "next")


async def test_no_turn_begins_before_it_is_saved_and_the_refusal_says_what_to_do(store, engine, ended):
    chats, chat, turn = ended
    asked = (await chats.open_chat("ann", chat)).turns[0].id
    for begin in (
        lambda: chats.send("ann", chat, "next"),
        lambda: chats.retry("ann", chat, turn),
        lambda: chats.edit("ann", chat, asked, "another q"),
        lambda: chats.continue_reply("ann", chat, turn),
    ):
        with pytest.raises(ReplyUnsaved, match=rf"not on disk yet \({FULL}\): make room.*then try again"):
            await begin()
    assert len(engine.requests) == 1
    assert [t.text for t in (await chats.open_chat("ann", chat)).turns] == ["q", TEXT]


async def test_with_room_again_the_next_message_saves_it_first_and_builds_on_all_of_it(store, disk, engine, ended):
    chats, chat, _ = ended
    disk.free()
    engine.scripts = [Script("Short.")]
    final = await (await chats.send("ann", chat, "next")).wait()
    assert final.unsaved == "" and chats.unsaved("ann", chat) is None
    assert [t.text for t in await store.path("ann", chat, final.turn_id)] == ["q", TEXT, "next", "Short."]
    assert TEXT in engine.tokenizer.decode(engine.requests[-1][0])
    assert final.figures.reused_prefix == final.figures.stored_before > len(TEXT)


async def test_with_room_again_an_export_saves_it(store, disk, ended):
    chats, chat, _ = ended
    disk.free()
    assert (await chats.export_chat("ann", chat))["turns"][-1]["text"] == TEXT
    assert await stored(store, chat) == (TEXT, "done")


async def test_it_is_tried_again_until_there_is_room_and_the_log_has_one_line_of_it(
    store, disk, engine, retry_every, caplog
):
    retry_every(0.01)
    caplog.set_level(logging.INFO)
    chats = ChatService(store, engine)
    chat = await chats.new_chat("ann")
    job = await chats.send("ann", chat, "q")
    disk.fill()
    await asyncio.wait_for(job.wait(), 10)
    reply = chats.unsaved("ann", chat)
    assert reply is not None and not await reply.settled_within(0.3)
    assert (
        len([r for r in caplog.records if r.levelno >= logging.WARNING and FULL in r.getMessage() + str(r.exc_info)])
        == 1
    )
    disk.free()
    assert await reply.settled_within(5)
    assert await stored(store, chat) == (TEXT, "done")
    turn = (await chats.open_chat("ann", chat)).turns[-1]
    assert turn.unsaved == "" and turn.text == TEXT and chats.unsaved("ann", chat) is None


async def test_shutdown_saves_it_once_there_is_room(tmp_path, store, disk, ended):
    chats, chat, _ = ended
    disk.free()
    await chats.shutdown()
    store.close()
    again = Store(tmp_path)
    assert await stored(again, chat) == (TEXT, "done")
    again.close()


async def test_shutdown_on_a_full_disk_says_what_is_lost_and_ends(store, ended, caplog):
    chats, _, turn = ended
    await asyncio.wait_for(chats.shutdown(), 5)
    await chats.shutdown()
    assert [r.getMessage() for r in caplog.records if "lost" in r.getMessage()] == [
        f"the end of the reply of turn {turn} is lost: {FULL}"
    ]


async def test_with_its_chat_it_is_deleted(store, ended, caplog):
    chats, chat, _ = ended
    reply = chats.unsaved("ann", chat)
    await chats.delete_chat("ann", chat)
    assert reply.settled.is_set() and chats.unsaved("ann", chat) is None
    with pytest.raises(ChatNotFound):
        await chats.open_chat("ann", chat)


async def test_a_deletion_that_the_database_refuses_keeps_it(store, ended, monkeypatch):
    chats, chat, _ = ended

    async def refuse(*_: Any) -> None:
        raise sqlite3.OperationalError(FULL)

    with monkeypatch.context() as patched, pytest.raises(ValueError, match="make room"):
        patched.setattr(store, "delete_chat", refuse)
        await chats.delete_chat("ann", chat)
    assert (await chats.open_chat("ann", chat)).turns[-1].text == TEXT


async def test_a_continued_reply_keeps_both_its_parts(store, disk, engine, retry_every):
    engine.scripts = [Script("The beginning, ", end="length"), Script(TEXT, first=0.05)]
    chats = ChatService(store, engine)
    chat = await chats.new_chat("ann")
    first = await (await chats.send("ann", chat, "q")).wait()
    job = await chats.continue_reply("ann", chat, first.turn_id)
    disk.fill()
    await asyncio.wait_for(job.wait(), 10)
    assert (await chats.open_chat("ann", chat)).turns[-1].text == "The beginning, " + TEXT
    disk.free()
    await chats.shutdown()
    assert await stored(store, chat) == ("The beginning, " + TEXT, "done")


async def test_settings_that_stay_as_they_are_need_no_room(store, ended):
    """Every message brings the form's settings along: its refusal must be about the reply, not about them."""
    chats, chat, _ = ended
    kept = await chats.settings("ann", chat)

    async def refuse(*_: Any) -> None:
        raise sqlite3.OperationalError(FULL)

    store.set_settings = refuse
    await chats.change_settings("ann", chat, temperature=kept.temperature, stop=kept.stop)
    with pytest.raises(ValueError, match=f"{FULL}.*nothing was changed; make room"):
        await chats.change_settings("ann", chat, temperature=0.1)


def test_a_running_reply_that_cannot_be_saved_says_so_only_as_long_as_it_cannot():
    def last(reason: str) -> str:
        snapshot = JobSnapshot("a", 2, "Text", "decode", 0, 10, "running", Figures(), unsaved=reason)
        return chat_view._running(snapshot)[-1]["content"][0]["text"]

    assert f"not on disk yet: {FULL}" in last(FULL) and "as soon as that works" in last("disk I/O error")
    assert last("") == "Text"


async def test_watchers_learn_at_once_that_a_save_failed_and_that_one_worked(store, disk, retry_every):
    engine = ScriptedEngine(scripts=[Script(TEXT, end="hang")], max_model_len=50_000)
    chats = ChatService(store, engine)
    job = await chats.send("ann", await chats.new_chat("ann"), "q")
    disk.fill()
    said = []
    async with asyncio.timeout(10):
        async for snapshot in job.watch():
            if not said or said[-1] != snapshot.unsaved:
                said.append(snapshot.unsaved)
            if len(said) == 2:
                disk.free()
            if len(said) == 3:
                break
    assert said == ["", FULL, ""]
    await chats.shutdown()


async def test_a_page_that_follows_is_told_of_the_end_and_again_when_it_is_on_disk(disk, ended):
    chats, chat, _ = ended
    showing = Showing(chats, lambda: 0.0)
    showing.page = page_parts()
    shown = await showing.show(TAB, "ann", chat)
    assert shown["chat_list"]["answering"] is True and "not on disk yet" in json.dumps(shown["chatbot"])
    endings = []
    async with asyncio.timeout(10):
        async for _, panel in showing.follow(TAB, "ann", chat, 0):
            if "turns" not in panel:
                continue
            endings.append(panel["ended"])
            settled = await showing.settle(TAB, "ann", chat, 0)
            assert ("not on disk yet" in json.dumps(settled["chatbot"])) == (len(endings) == 1)
            if len(endings) == 1:
                disk.free()
                await chats.export_chat("ann", chat)
    assert len(endings) == len(set(endings)) == 2


async def test_a_tab_that_shows_another_chat_waits_for_it_no_longer(ended, monkeypatch):
    monkeypatch.setattr("app.page_show.GONE_SECONDS", 0.05)
    chats, chat, _ = ended
    showing = Showing(chats, lambda: 0.0)
    showing.page = page_parts()
    await showing.show(TAB, "ann", chat)
    async with asyncio.timeout(5):
        async for _, panel in showing.follow(TAB, "ann", chat, 0):
            if "turns" in panel:
                await showing.show(TAB, "ann", "")
