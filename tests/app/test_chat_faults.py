"""Chats when the engine breaks in mid-reply: what was said is stored, with the cause."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

import history_model
from app import server
from app.chat import ChatService
from app.jobs import Job
from app.kv_hub import KVHub
from app.store import Store
from engine import watchdog
from engine.config import EngineConfig
from engine.engine_thread import EngineThread
from engine.llm_engine import LLMEngine
from tests.app.scripted_engine import byte_tokenizer

REPLY = "a reply that is never finished, " * 4


def replying_engine(monkeypatch: pytest.MonkeyPatch) -> LLMEngine:
    """A real LLMEngine whose model says REPLY, a byte a step."""
    tokenizer = byte_tokenizer()
    script, turn_head = tokenizer.encode(REPLY), len(tokenizer.encode("assistant\n"))

    def next_token(history: list[int]) -> int:
        marker = len(history) - 1 - history[::-1].index(256)  # <|im_start|>
        return script[len(history) - marker - 1 - turn_head]

    monkeypatch.setattr(history_model, "next_token", next_token)
    engine = history_model.history_engine(64, 4, max_model_len=250)
    engine.model_config = replace(engine.model_config, vocab_size=258, eos_token_ids=(257,))
    engine.tokenizer = tokenizer
    return engine


async def broken_off(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, how: str, release: threading.Event
) -> tuple[EngineThread, Store, ChatService, str, Job]:
    """A chat whose reply breaks off after 20 tokens: the step raises, or hangs until `release`."""
    inner = replying_engine(monkeypatch)
    launch = inner.runner.launch

    def breaking(plan: Any) -> Any:
        if any(item.seq.num_output_tokens == 20 for item in plan.items):
            release.wait(20 if how == "hangs" else 0)
            raise RuntimeError("the card is gone")
        return launch(plan)

    inner.runner.launch = breaking  # type: ignore[method-assign]
    monkeypatch.setattr("engine.llm_engine.LLMEngine", lambda config, progress: inner)
    engine = EngineThread(EngineConfig())
    engine.start()
    assert await asyncio.to_thread(engine.wait_until_settled, 10)
    store = Store(tmp_path)
    chats = ChatService(store, engine)
    chat = await chats.new_chat("ann")
    return engine, store, chats, chat, await chats.send("ann", chat, "Go on.")


@pytest.mark.parametrize("how", ["raises", "hangs"])
async def test_a_fault_in_mid_reply_stores_what_there_is_under_its_cause(
    how: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.1)
    release = threading.Event()
    engine, store, chats, chat, job = await broken_off(tmp_path, monkeypatch, how, release)
    async with asyncio.timeout(10):
        final = await job.wait()
    cause = "did not end within its deadline" if how == "hangs" else "the card is gone"
    assert final.status == "error" and cause in (final.figures.error or "")
    turn = (await chats.open_chat("ann", chat)).turns[-1]
    assert turn.text == REPLY[:20]
    assert final.figures.prompt_tokens > 0 and final.figures.output_tokens == 20
    async with asyncio.timeout(5):
        await chats.shutdown()
    release.set()
    engine.shutdown()
    store.close()


async def test_a_shutdown_during_a_step_that_goes_on_and_on_stores_the_reply_as_cut(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ENGINE_TIMEOUT", 0.3)
    release = threading.Event()
    engine, store, chats, chat, job = await broken_off(tmp_path, monkeypatch, "hangs", release)
    async with asyncio.timeout(5):
        while len(job.snapshot().text) < 20:  # noqa: ASYNC110  watch() would do, at 12 looks a second
            await asyncio.sleep(0.01)
        await server._close(chats, KVHub(engine), engine)
        final = await job.wait()
    assert (final.status, final.text) == ("cut", REPLY[:20])
    assert (await chats.open_chat("ann", chat)).turns[-1].text == REPLY[:20]
    release.set()
    store.close()
