"""Jobs: they run whoever watches, every watcher sees the end, and what was said is on disk."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import threading
import time

import pytest

from app.chat import ChatError, ChatService
from app.jobs import UPDATES_PER_SECOND
from app.store import Store
from engine.engine_thread import QueueFull
from tests.app.scripted_engine import Script, ScriptedEngine

LONG = Script("word " * 400, pace=0.004)


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path)
    yield opened
    opened.close()


async def begun(store: Store, script: Script, **options):
    engine = ScriptedEngine(scripts=[script])
    chats = ChatService(store, engine, **options)
    chat = await chats.new_chat("ann")
    return engine, chats, chat, await chats.send("ann", chat, "q")


async def until(condition, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - conditions on state that sends no events
            await asyncio.sleep(0.01)


async def watched(job) -> list:
    return [snapshot async for snapshot in job.watch()]


async def test_every_watcher_sees_growing_text_and_the_same_end(store):
    _, _, _, job = await begun(store, Script("word " * 60, pace=0.002))
    first = asyncio.create_task(watched(job))
    await asyncio.sleep(0.2)
    results = await asyncio.gather(first, *(watched(job) for _ in range(3)))
    for seen in results:
        texts = [s.text for s in seen]
        assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
        assert [s.done for s in seen] == [False] * (len(seen) - 1) + [True]
        assert seen[-1].text == "word " * 60 and seen[-1].line.endswith("end of turn")
    assert (await watched(job))[-1].text == "word " * 60


async def test_a_watcher_gets_at_most_twelve_updates_a_second(store):
    _, _, _, job = await begun(store, Script("x" * 500, pace=0.001))
    start = time.perf_counter()
    seen = await watched(job)
    # One at once and one at the end come on top.
    assert 2 <= len(seen) <= (time.perf_counter() - start) * UPDATES_PER_SECOND + 2


async def test_the_end_is_not_held_back_by_the_update_rate(store, monkeypatch):
    monkeypatch.setattr("app.jobs.UPDATES_PER_SECOND", 0.01)
    _, _, _, job = await begun(store, Script("x", end="hang"))
    watcher = asyncio.create_task(watched(job))
    await until(lambda: job.snapshot().text == "x")
    await asyncio.sleep(0.1)
    job.stop()
    await job.wait()
    assert (await asyncio.wait_for(watcher, 10))[-1].done


async def test_a_reply_goes_on_when_its_watcher_leaves_and_nobody_returns(store):
    _, chats, chat, job = await begun(store, Script("whole reply", pace=0.005))
    async for _ in job.watch():
        break
    await job.wait()
    turn = (await chats.open_chat("ann", chat)).turns[-1]
    assert (turn.text, turn.status) == ("whole reply", "done")


async def test_a_caller_cancelled_in_mid_send_leaves_a_job_not_a_dead_turn(store):
    engine = ScriptedEngine(scripts=[Script("whole reply")])
    chats = ChatService(store, engine)
    chat = await chats.new_chat("ann")
    for delay in (0.0, 0.002, 0.01):
        task = asyncio.create_task(chats.send("ann", chat, "q"))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.3)
    turns = (await chats.open_chat("ann", chat)).turns
    assert turns and all(t.status == "done" for t in turns)
    assert [t.text for t in turns if t.role == "assistant"] == ["whole reply"] * (len(turns) // 2)


async def test_stop_keeps_the_text_and_the_figures_and_frees_the_chat(store):
    engine, chats, chat, job = await begun(store, LONG)
    await until(lambda: len(job.snapshot().text) > 20)
    assert await chats.stop("ann", chat)
    final = await job.wait()
    assert final.status == "stopped" and len(final.text) > 20 and final.line.endswith("· stopped")
    assert engine.running == 0
    assert not await chats.stop("ann", chat)
    turn = (await chats.open_chat("ann", chat)).turns[-1]
    assert (turn.text, turn.status, turn.line, turn.can_continue) == (final.text, "stopped", final.line, True)
    await chats.send("ann", chat, "next")
    await chats.shutdown()


async def test_stop_before_the_first_token(store):
    _, chats, chat, job = await begun(store, Script(first=60))
    await chats.stop("ann", chat)
    final = await job.wait()
    assert (final.text, final.status, final.figures.output_tokens) == ("", "stopped", 0)
    assert final.line.startswith(f"{final.figures.prompt_tokens} prompt (0 cached) · 0 out")


async def test_stop_and_delete_reach_a_send_that_is_still_preparing(store):
    engine = ScriptedEngine(scripts=[Script("x", end="hang")])
    encode = engine.tokenizer.encode_chat
    preparing = threading.Event()

    def slow(*args, **kwargs):
        preparing.set()
        time.sleep(0.2)
        return encode(*args, **kwargs)

    engine.tokenizer.encode_chat = slow
    chats = ChatService(store, engine)
    for end in (chats.stop, chats.delete_chat):
        preparing.clear()
        chat = await chats.new_chat("ann")
        send = asyncio.create_task(chats.send("ann", chat, "q"))
        await until(preparing.is_set)
        await end("ann", chat)
        assert (await (await send).wait()).status == "stopped"
        assert engine.running == 0


async def test_two_chats_answer_at_once_and_keep_apart(store):
    engine = ScriptedEngine(scripts=[Script("aaa " * 50, pace=0.002), Script("bbb " * 50, pace=0.002)])
    chats = ChatService(store, engine)
    one, two = await chats.new_chat("ann"), await chats.new_chat("ann")
    jobs = [await chats.send("ann", one, "q"), await chats.send("ann", two, "q")]
    assert engine.running == 2 or not jobs[0].done
    assert [c.answering for c in await chats.list_chats("ann")] == [True, True]
    await asyncio.gather(*(job.wait() for job in jobs))
    assert (await chats.open_chat("ann", one)).turns[-1].text == "aaa " * 50
    assert (await chats.open_chat("ann", two)).turns[-1].text == "bbb " * 50
    assert [c.answering for c in await chats.list_chats("ann")] == [False, False]


async def test_an_open_chat_shows_its_running_reply_as_it_is_now(store):
    _, chats, chat, job = await begun(store, LONG)
    await until(lambda: len(job.snapshot().text) > 20)
    view = await chats.open_chat("ann", chat)
    assert view.job is job and view.turns[-1].id == job.turn_id
    assert len(view.turns[-1].text) > 20 and view.turns[-1].status == "running"
    await chats.shutdown()


async def test_a_chat_opened_while_its_reply_starts_or_ends_never_shows_it_as_cut(store):
    engine = ScriptedEngine(scripts=[Script("whole reply")])
    chats = ChatService(store, engine)
    chat = await chats.new_chat("ann")

    async def look() -> list[str]:
        seen = []
        while not stop.is_set():
            seen += [t.status for t in (await chats.open_chat("ann", chat)).turns]
        return seen

    for _ in range(10):
        stop = asyncio.Event()
        watchers = [asyncio.create_task(look()) for _ in range(3)]
        await (await chats.send("ann", chat, "q")).wait()
        stop.set()
        assert set(itertools.chain(*await asyncio.gather(*watchers))) <= {"done", "running"}


async def test_rows_read_before_a_reply_ended_are_read_again(store):
    _, chats, chat, job = await begun(store, Script("x", end="hang"))
    real_read = store.chat_and_turns

    async def read_then_end(*args):
        rows = await real_read(*args)
        job.stop()
        await job.wait()
        return rows

    store.chat_and_turns = read_then_end
    view = await chats.open_chat("ann", chat)
    assert view.job is None
    assert (view.turns[-1].status, view.turns[-1].text, view.turns[-1].can_continue) == ("stopped", "x", True)


async def test_the_partial_text_is_on_disk_within_two_seconds(store):
    _, chats, chat, job = await begun(store, LONG)
    await asyncio.sleep(2)
    row = (await store.path("ann", chat, job.turn_id))[-1]
    assert row.status == "running" and len(row.text) > 50
    assert len(row.reply) >= len(row.text)
    await chats.shutdown()


async def test_shutdown_stores_every_running_reply_and_refuses_new_ones(store):
    engine = ScriptedEngine(scripts=[LONG])
    chats = ChatService(store, engine)
    ids = [await chats.new_chat("ann") for _ in range(3)]
    jobs = [await chats.send("ann", chat, "q") for chat in ids]
    await until(lambda: all(len(job.snapshot().text) > 10 for job in jobs))
    await chats.shutdown()
    assert engine.running == 0
    for chat, job in zip(ids, jobs, strict=True):
        turn = (await chats.open_chat("ann", chat)).turns[-1]
        assert turn.status == "cut" and turn.text == job.snapshot().text and len(turn.text) > 10
        assert turn.line.endswith("cut off (the server ended)") and turn.can_continue
    with pytest.raises(ChatError, match="shutting down"):
        await chats.send("ann", ids[0], "more")


async def test_an_unwatched_job_ends_only_where_that_was_asked_for(store):
    _, _, _, job = await begun(store, Script("x", end="hang"), abandon_after=0.2)
    watcher = asyncio.create_task(watched(job))
    await asyncio.sleep(0.5)
    assert not job.done
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    await asyncio.sleep(0.1)
    assert not job.done
    async for _ in job.watch():
        break  # a look in resets the clock
    await asyncio.sleep(0.15)
    assert not job.done
    final = await asyncio.wait_for(job.wait(), 10)
    assert final.status == "stopped" and "nobody was watching" in final.line


async def test_a_job_that_nobody_ever_watched_is_abandoned_too(store):
    _, _, _, job = await begun(store, Script("x", end="hang"), abandon_after=0.1)
    assert (await asyncio.wait_for(job.wait(), 10)).status == "stopped"


async def test_an_error_of_the_engine_stands_under_the_reply_and_a_retry_works(store):
    engine, chats, chat, job = await begun(store, Script("some text", end="error"))
    final = await job.wait()
    assert (final.text, final.status) == ("some text", "error")
    assert final.line.endswith("error: the engine fell over")
    engine.scripts = [Script("fine")]
    assert (await (await chats.retry("ann", chat, job.turn_id)).wait()).text == "fine"


async def test_a_stream_that_breaks_ends_the_reply_with_the_cause(store):
    _, chats, chat, job = await begun(store, Script("half", end="break"))
    final = await asyncio.wait_for(job.wait(), 10)
    assert (final.text, final.status) == ("half", "error") and final.line.endswith("error: lost the device")
    assert (await chats.open_chat("ann", chat)).turns[-1].line == final.line


async def test_a_full_disk_does_not_end_a_reply_and_the_page_learns_of_it(store):
    _, chats, chat, job = await begun(store, Script("word " * 300, pace=0.004))
    real_save, fail = store.save_turn, True

    async def save(*args):
        if fail:
            raise sqlite3.OperationalError("database or disk is full")
        await real_save(*args)

    store.save_turn = save
    await until(lambda: job.snapshot().unsaved != "")
    assert "disk is full" in job.snapshot().unsaved and not job.done
    fail = False
    final = await asyncio.wait_for(job.wait(), 20)
    assert final.unsaved == "" and final.text == "word " * 300
    assert (await chats.open_chat("ann", chat)).turns[-1].text == final.text


async def test_a_full_disk_refuses_a_new_chat_in_words(store, monkeypatch):
    async def create(*_):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store, "create_chat", create)
    with pytest.raises(ChatError, match=r"database or disk is full.*nothing was changed"):
        await ChatService(store, ScriptedEngine(scripts=[Script("x")])).new_chat("ann")


async def test_a_reply_that_could_not_begin_and_not_be_taken_back_shows_as_cut_not_as_running_for_ever(store):
    engine = ScriptedEngine(scripts=[Script("x")], refuse=QueueFull("too many"))
    chats = ChatService(store, engine)
    chat = await chats.new_chat("ann")

    async def withdraw(*args):
        raise sqlite3.OperationalError("database or disk is full")

    store.withdraw_turns = withdraw
    with pytest.raises(ChatError, match="full"):
        await chats.send("ann", chat, "q")
    turn = (await chats.open_chat("ann", chat)).turns[-1]
    assert turn.status == "cut" and turn.can_continue


async def test_phases_go_from_waiting_to_done(store):
    _, _, _, job = await begun(store, Script("abc", first=0.2, pace=0.1))
    phases = [s.phase for s in await watched(job)]
    assert phases[0] == "waiting" and "decode" in phases and phases[-1] == "done"


@pytest.mark.parametrize("continued", [True, False])
async def test_ids_whose_text_was_held_back_when_the_server_died_are_not_sent_again(tmp_path, continued):
    store = Store(tmp_path)
    engine, chats, chat, job = await begun(store, Script("a 🙂", end="hang"))
    await until(lambda: "🙂" in job.snapshot().text)
    # As the last save of a dying server may leave it: two of the four bytes of the character, none of it shown.
    row = (await store.path("ann", chat, job.turn_id))[-1]
    row.text, row.reply, row.status = "a ", engine.tokenizer.encode("a 🙂")[:-2], "running"
    await chats.shutdown()
    await store.save_turn("ann", chat, row)
    store.close()
    store = Store(tmp_path)
    engine.scripts = [Script("🙂!")]
    chats = ChatService(store, engine)
    if continued:
        final = await (await chats.continue_reply("ann", chat, job.turn_id)).wait()
        assert final.text == "a 🙂!"
        assert engine.requests[-1][0][-2:] == engine.tokenizer.encode("a ")
    else:
        final = await (await chats.send("ann", chat, "next")).wait()
        sent = engine.tokenizer.decode(engine.requests[-1][0], skip_special_tokens=False)
        assert "<|im_start|>assistant\na <|im_end|>\n<|im_start|>user\nnext" in sent
    assert final.figures.reused_prefix == final.figures.stored_before
    store.close()
