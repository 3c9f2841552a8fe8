"""The store: trees of turns with exact ids, users apart, deletions that delete, and searches."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time

import pytest

from app.records import TurnRow, full_ids
from app.store import NotFound, Store, StoreError


@pytest.fixture
def store(tmp_path):
    with_store = Store(tmp_path / "data")
    yield with_store
    with_store.close()


def user_turn(text: str, parent: int | None = None) -> TurnRow:
    return TurnRow(id=0, parent=parent, role="user", text=text)


def reply(text: str, **fields) -> TurnRow:
    return TurnRow(id=0, parent=None, role="assistant", text=text, **fields)


async def test_a_turn_comes_back_as_it_was_stored(store):
    chat = await store.create_chat("ann")
    stored = reply(
        "Hé 🙂\0end",
        status="stopped",
        figures={"ttft": 0.25},
        fingerprint="f",
        common=3,
        suffix=[1, 2],
        reply=[49151, 0],
    )
    _, turn_id = await store.add_turns("ann", chat, [user_turn("你好"), stored])
    question, back = await store.path("ann", chat, turn_id)
    assert (question.text, question.role, question.parent) == ("你好", "user", None)
    assert (back.text, back.status, back.figures) == ("Hé 🙂\0end", "stopped", {"ttft": 0.25})
    assert (back.fingerprint, back.common, back.suffix, back.reply) == ("f", 3, [1, 2], [49151, 0])
    assert back.parent == question.id
    assert (await store.chat("ann", chat)).leaf == turn_id


async def test_branches_share_their_trunk_and_ids_are_rebuilt_exactly(store):
    """Random trees: a reply's full ids are what was sent plus what came back, on every branch."""
    rng = random.Random(7)
    chat = await store.create_chat("ann")
    truth: dict[int | None, list[int]] = {None: []}
    for _ in range(40):
        parent = rng.choice(list(truth))
        before = truth[parent]
        # The template may rewrite some of what was there (Qwen3's thoughts): keep a random part of it.
        common = rng.randint(0, len(before))
        suffix = [rng.randrange(50_000) for _ in range(rng.randint(1, 6))]
        said = [rng.randrange(50_000) for _ in range(rng.randint(0, 6))]
        turns = [user_turn("q", parent), reply("a", fingerprint="f", common=common, suffix=suffix, reply=said)]
        _, leaf = await store.add_turns("ann", chat, turns)
        truth[leaf] = before[:common] + suffix + said
    for leaf, ids in truth.items():
        assert full_ids(await store.path("ann", chat, leaf)) == ids


async def test_nothing_of_another_user_is_ever_found(store):
    chat = await store.create_chat("ann")
    question, answer = await store.add_turns("ann", chat, [user_turn("a secret"), reply("hush")])
    calls = [
        store.chat("bob", chat),
        store.chat_and_turns("bob", chat),
        store.path("bob", chat, answer),
        store.rename("bob", chat, "mine"),
        store.set_settings("bob", chat, {}),
        store.open_branch("bob", chat, question),
        store.add_turns("bob", chat, [user_turn("me too", answer)]),
        store.save_turn("bob", chat, TurnRow(id=answer, parent=question, role="assistant", text="forged")),
        store.withdraw_turns("bob", chat, [question], None),
        store.delete_chat("bob", chat),
    ]
    for call in calls:
        with pytest.raises(NotFound):
            await call
    assert await store.chats("bob", 10) == []
    assert await store.search("bob", "secret", 10) == []
    row, turns = await store.chat_and_turns("ann", chat)
    assert row.title == "" and row.leaf == answer
    assert [t.text for t in turns] == ["a secret", "hush"]


async def test_a_branch_is_opened_down_to_its_newest_leaf_whatever_is_added_just_before(store):
    """As of the moment at which it is opened: a message that was sent a moment earlier stays in sight."""
    chat = await store.create_chat("ann")
    question, first = await store.add_turns("ann", chat, [user_turn("q"), reply("a")])
    [second] = await store.add_turns("ann", chat, [TurnRow(id=0, parent=question, role="assistant", text="another")])
    added = asyncio.create_task(store.add_turns("ann", chat, [user_turn("and?", first), reply("so")]))
    await asyncio.sleep(0)  # its write is under way
    await store.open_branch("ann", chat, first)
    assert (await store.chat("ann", chat)).leaf == (await added)[-1]
    await store.open_branch("ann", chat, second)
    assert (await store.chat("ann", chat)).leaf == second
    await store.open_branch("ann", chat, question)  # of two replies the newer
    assert (await store.chat("ann", chat)).leaf == second


async def test_a_turn_of_another_chat_of_the_same_user_is_not_found(store):
    one, two = await store.create_chat("ann"), await store.create_chat("ann")
    [turn_id] = await store.add_turns("ann", one, [user_turn("in one")])
    for call in (
        store.path("ann", two, turn_id),
        store.open_branch("ann", two, turn_id),
        store.add_turns("ann", two, [user_turn("x", turn_id)]),
        store.save_turn("ann", two, TurnRow(id=turn_id, parent=None, role="user", text="x")),
    ):
        with pytest.raises(NotFound):
            await call
    await store.withdraw_turns("ann", two, [turn_id], None)
    assert [t.text for t in await store.path("ann", one, turn_id)] == ["in one"]


async def test_a_deleted_chat_leaves_no_byte_behind_while_the_store_is_open(store, tmp_path):
    keep, drop = await store.create_chat("ann", "kept title"), await store.create_chat("ann", "wiped-title")
    await store.add_turns("ann", keep, [user_turn("kept-words")])
    _, answer = await store.add_turns("ann", drop, [user_turn("wiped-words " * 2000), reply("")])
    for size in range(5):
        turn = TurnRow(id=answer, parent=None, role="assistant", text="wiped-reply " * 3000 * size, status="running")
        await store.save_turn("ann", drop, turn)
    await store.delete_chat("ann", drop)
    files = b"".join(p.read_bytes() for p in (tmp_path / "data").iterdir())
    assert b"kept-words" in files and b"kept title" in files
    assert b"wiped" not in files


async def test_turn_ids_are_not_used_again_after_a_deletion(store):
    chat = await store.create_chat("ann")
    [old] = await store.add_turns("ann", chat, [user_turn("x")])
    await store.delete_chat("ann", chat)
    chat = await store.create_chat("ann")
    [new] = await store.add_turns("ann", chat, [user_turn("y")])
    assert new > old


async def test_search_finds_any_substring_in_any_script_and_takes_wildcards_literally(store):
    async def chat(title: str, *texts: str) -> str:
        chat_id = await store.create_chat("ann", title)
        for text in texts:
            await store.add_turns("ann", chat_id, [user_turn(text)])
        return chat_id

    percent = await chat("prices", "it fell by 50% in a_b")
    chinese = await chat("旅行", "我想去北京看长城")
    german = await chat("Straßen", "ÜBER alle Berge")
    find = lambda text: store.search("ann", text, 10)  # noqa: E731
    assert [c.id for c in await find("0% in")] == [percent]
    assert await find("a%b") == [] and await find("a.b") == []
    assert [c.id for c in await find("a_b")] == [percent]
    assert [c.id for c in await find("北京")] == [chinese]
    assert [c.id for c in await find("旅")] == [chinese]
    assert [c.id for c in await find("über ALLE")] == [german]
    assert [c.id for c in await find("STRASSEN")] == [german]
    assert "去北京看" in (await find("北京"))[0].snippet
    assert (await find("prices"))[0].snippet == ""


async def test_the_list_is_newest_first_and_pages_through(store):
    ids = [await store.create_chat("ann", f"chat {n}") for n in range(5)]
    await store.add_turns("ann", ids[1], [user_turn("x")])
    order = [c.id for c in await store.chats("ann", 10)]
    assert order == [ids[1], ids[4], ids[3], ids[2], ids[0]]
    assert [c.id for c in await store.chats("ann", 2, 2)] == order[2:4]


async def test_a_title_given_by_the_user_is_kept(store):
    chat = await store.create_chat("ann")
    [first] = await store.add_turns("ann", chat, [user_turn("hello")], title="hello")
    assert (await store.chat("ann", chat)).title == "hello"
    await store.rename("ann", chat, "My trip")
    await store.add_turns("ann", chat, [user_turn("more", first)], title="more")
    assert (await store.chat("ann", chat)).title == "My trip"


async def test_a_write_that_fails_leaves_nothing_of_itself_and_the_next_one_works(store):
    chat = await store.create_chat("ann")
    bad = TurnRow(id=0, parent=None, role="robot", text="x")
    with pytest.raises(sqlite3.IntegrityError):
        await store.add_turns("ann", chat, [user_turn("first"), bad])
    row, turns = await store.chat_and_turns("ann", chat)
    assert turns == [] and row.leaf is None
    assert await store.add_turns("ann", chat, [user_turn("again")])


async def test_a_write_goes_through_though_its_caller_was_cancelled(store):
    chat = await store.create_chat("ann")
    # The writer is busy: the next write waits in the queue, where a cancellation could take it out.
    store._db.write(lambda db: time.sleep(0.2))
    task = asyncio.create_task(store.add_turns("ann", chat, [user_turn("said")]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.rename("ann", chat, "barrier")
    _, turns = await store.chat_and_turns("ann", chat)
    assert [t.text for t in turns] == ["said"]


async def test_many_readers_and_writers_at_once(store):
    chats = [await store.create_chat(f"user{n}") for n in range(8)]

    async def use(n: int) -> None:
        parent = None
        for turn in range(20):
            [parent] = await store.add_turns(f"user{n}", chats[n], [user_turn(f"{n}:{turn}", parent)])
            path = await store.path(f"user{n}", chats[n], parent)
            assert [t.text for t in path] == [f"{n}:{i}" for i in range(turn + 1)]

    await asyncio.gather(*(use(n) for n in range(8)))


async def test_a_closed_store_says_so(tmp_path):
    store = Store(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.create_chat("ann")
