"""--isolate-users: what one user's chats wrote into the KV cache serves nobody else."""

from __future__ import annotations

import pytest

from app.chat import ChatService
from app.store import Store
from tests.app.scripted_engine import ScriptedEngine


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path)
    yield opened
    opened.close()


async def ask(chats: ChatService, user: str, chat: str | None = None) -> str:
    chat = chat or await chats.new_chat(user)
    await (await chats.send(user, chat, "What is a page?")).wait()
    return chat


async def test_every_user_has_a_salt_of_their_own_in_all_chats_and_turns(store):
    engine = ScriptedEngine()
    chats = ChatService(store, engine, isolate_users=True)
    await ask(chats, "ann", await ask(chats, "ann"))
    await ask(chats, "ann")
    await ask(chats, "bob")
    salts = [origin.cache_salt for origin in engine.origins]
    assert len(set(salts[:3])) == 1 and salts[3] != salts[0]
    assert "" not in salts, "an API request has the empty salt"


async def test_without_the_setting_all_users_share_the_cache(store):
    engine = ScriptedEngine()
    chats = ChatService(store, engine)
    await ask(chats, "ann")
    await ask(chats, "bob")
    assert [origin.cache_salt for origin in engine.origins] == ["", ""]


async def test_the_longest_user_id_is_a_valid_salt(store):
    engine = ScriptedEngine()
    await ask(ChatService(store, engine, isolate_users=True), "ü" * 200)
    assert engine.origins[0].cache_salt


async def test_each_request_tells_the_turn_that_it_answers(store):
    engine = ScriptedEngine()
    chats = ChatService(store, engine)
    chat = await ask(chats, "ann")
    await ask(chats, "ann", chat)
    view = await chats.open_chat("ann", chat)
    await (await chats.retry("ann", chat, view.turns[-1].id)).wait()
    await (await chats.edit("ann", chat, view.turns[0].id, "What is a book?")).wait()
    assert [origin.turn for origin in engine.origins] == [1, 2, 2, 1]
    assert len({origin.owner for origin in engine.origins}) == 1
