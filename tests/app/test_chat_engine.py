"""Chats on the real engine and the default model: what is reused, what stop frees, what a killed server leaves."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from app.chat import ChatService
from app.records import full_ids
from app.store import Store
from engine.config import EngineConfig
from engine.engine_thread import EngineThread

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 16


@pytest.fixture(scope="module")
def engine(default_model_path):
    # fp32: a continued reply is then token for token the uninterrupted one.
    thread = EngineThread(EngineConfig(model=str(default_model_path), dtype="float32", num_kvcache_blocks=256))
    thread.start()
    assert thread.wait_until_settled(120) and thread.status().error is None
    yield thread
    thread.shutdown()


@pytest.fixture
def chats(engine, tmp_path):
    store = Store(tmp_path)
    yield ChatService(store, engine)
    store.close()


async def greedy(chats: ChatService, user: str = "ann", max_tokens: int = 24, **changes) -> str:
    chat = await chats.new_chat(user)
    await chats.change_settings(user, chat, temperature=0.0, max_tokens=max_tokens, **changes)
    return chat


def computed(final) -> int:
    """Ids of a turn whose KV exists: its last sampled id was never fed back, unless the end of turn followed it."""
    total = final.figures.prompt_tokens + final.figures.output_tokens
    return total if final.figures.finish == "stop" else total - 1


async def test_the_second_turn_hits_every_full_block_of_the_first_reply_included(chats):
    chat = await greedy(chats, max_tokens=20)
    before = 0
    for message in ("Name three planets of the solar system.", "And three moons?", "Thank you."):
        final = await (await chats.send("ann", chat, message)).wait()
        assert final.status == "done" and final.figures.output_tokens > 0
        if before:
            assert final.figures.cached_tokens == before // BLOCK * BLOCK
            assert final.figures.cached_tokens > 0
        before = computed(final)
    line = (await chats.open_chat("ann", chat)).turns[-1].line
    assert line.startswith("TTFT ") and f"({final.figures.cached_tokens:,} cached)" in line


async def test_regenerate_hits_the_whole_prompt_and_edit_the_turns_before_it(chats):
    chat = await greedy(chats, max_tokens=8)
    first = await (await chats.send("ann", chat, "Tell me something about the sea, the sky and the mountains.")).wait()
    second = await (await chats.send("ann", chat, "More about the sky, please, and about clouds in autumn.")).wait()
    again = await (await chats.retry("ann", chat, second.turn_id)).wait()
    # At least one token is always computed.
    assert again.figures.cached_tokens == (second.figures.prompt_tokens - 1) // BLOCK * BLOCK
    assert again.text == second.text
    question = (await chats.open_chat("ann", chat)).turns[2]
    edited = await (await chats.edit("ann", chat, question.id, "Rather about the mountains.")).wait()
    assert edited.figures.cached_tokens >= computed(first) // BLOCK * BLOCK


async def test_a_continued_reply_is_the_one_that_would_have_come_uninterrupted(chats):
    whole_chat, parts_chat = await greedy(chats, max_tokens=24), await greedy(chats, max_tokens=12)
    whole = await (await chats.send("ann", whole_chat, "Tell a story about a fox.")).wait()
    part = await (await chats.send("ann", parts_chat, "Tell a story about a fox.")).wait()
    assert part.line.endswith("length limit (max tokens)") and whole.text.startswith(part.text)
    rest = await (await chats.continue_reply("ann", parts_chat, part.turn_id)).wait()
    assert rest.text == whole.text
    assert rest.figures.cached_tokens >= (computed(part) - BLOCK) // BLOCK * BLOCK
    ids = [
        full_ids(await chats._store.path("ann", c, t))
        for c, t in [(whole_chat, whole.turn_id), (parts_chat, rest.turn_id)]
    ]
    assert ids[0] == ids[1]


async def test_stop_frees_the_engine_at_once_and_keeps_the_text(chats, engine):
    chat = await greedy(chats, max_tokens=2000)
    job = await chats.send("ann", chat, "Write a very long story about a journey around the world.")
    async for snapshot in job.watch():
        if len(snapshot.text) > 10:
            break
    start = time.perf_counter()
    await chats.stop("ann", chat)
    while engine.status().running:  # noqa: ASYNC110 - the engine's thread sends no event for this
        await asyncio.sleep(0.005)
    assert time.perf_counter() - start < 5  # of the minute that the whole reply takes
    final = await job.wait()
    assert final.status == "stopped" and len(final.text) > 10
    assert engine.status().kv["active"] == 0
    await chats.change_settings("ann", chat, max_tokens=2)
    after = await (await chats.send("ann", chat, "Stop there.")).wait()
    assert after.figures.reused_prefix == after.figures.stored_before
    await chats.delete_chat("ann", chat)


async def test_a_stop_string_keeps_its_blocks_and_ids_apart_from_what_followed(chats):
    chat = await greedy(chats, max_tokens=40, stop=(" planet",))
    final = await (await chats.send("ann", chat, "What is Jupiter? Answer in one full sentence.")).wait()
    assert final.line.endswith("stop string") and " planet" not in final.text
    await chats.change_settings("ann", chat, max_tokens=2)
    after = await (await chats.send("ann", chat, "And Saturn?")).wait()
    assert after.figures.reused_prefix == after.figures.stored_before
    assert after.figures.diverged_at is None


async def test_two_users_at_once_get_their_own_replies_and_never_see_each_other(chats):
    mine, theirs = await greedy(chats, "ann", 12), await greedy(chats, "bob", 12)
    jobs = [await chats.send("ann", mine, "Count from one to ten."), await chats.send("bob", theirs, "Name a colour.")]
    together = [(await job.wait()).text for job in jobs]
    assert [c.id for c in await chats.list_chats("ann")] == [mine]
    assert [c.id for c in await chats.list_chats("bob")] == [theirs]
    assert await chats.search("bob", "Count") == []
    alone = await greedy(chats, "ann", 12)
    assert (await (await chats.send("ann", alone, "Count from one to ten.")).wait()).text == together[0]


async def test_a_prompt_beyond_the_pool_is_refused_with_both_numbers_before_it_is_written(chats, engine):
    chat = await greedy(chats)
    room = engine.status().kv["total"] * BLOCK
    with pytest.raises(ValueError, match=f"{room:,}"):
        await chats.send("ann", chat, "word " * (room + 100))
    assert (await chats.open_chat("ann", chat)).turns == []


def test_a_server_killed_in_mid_reply_leaves_the_message_and_the_partial_reply_marked_as_cut(
    shallow_model_path, tmp_path
):
    program = textwrap.dedent(f"""
        import asyncio
        from app.chat import ChatService
        from app.store import Store
        from engine.config import EngineConfig
        from engine.engine_thread import EngineThread

        async def main():
            engine = EngineThread(EngineConfig(model={str(shallow_model_path)!r}, num_kvcache_blocks=512))
            engine.start()
            await asyncio.to_thread(engine.wait_until_settled)
            store = Store({str(tmp_path)!r})
            chats = ChatService(store, engine)
            chat = await chats.new_chat("ann")
            await chats.change_settings("ann", chat, max_tokens=4000)
            job = await chats.send("ann", chat, "Write a very long story about a whale.")
            while not (await store.path("ann", chat, job.turn_id))[-1].text:
                await asyncio.sleep(0.05)
            print(chat, flush=True)
            await job.wait()

        asyncio.run(main())
    """)
    server = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    chat = server.stdout.readline().strip()
    server.kill()
    server.wait()
    server.stdout.close()
    assert chat

    async def what_is_left():
        store = Store(tmp_path)
        view = await ChatService(store, EngineThread(EngineConfig())).open_chat("ann", chat)
        store.close()
        return view.turns

    question, reply = asyncio.run(what_is_left())
    assert question.text == "Write a very long story about a whale."
    assert reply.status == "cut" and reply.text and reply.can_continue
    assert reply.line.endswith("cut off (the server ended)") and reply.line.startswith("TTFT ")
