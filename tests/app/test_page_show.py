"""Showing a chat: what a tab gets when it follows a reply, also when the reply or the tab has moved on meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.chat import ChatNotFound, ChatSettings, ChatView, Figures, JobSnapshot, TurnView
from app.page_show import Showing


class Job:
    """A reply of the given texts; `during` is called before each of them is seen."""

    def __init__(self, texts: list[str], during: Any = None) -> None:
        self.left, self._texts, self._during = False, texts, during

    def snapshot(self, text: str = "", phase: str = "decode") -> JobSnapshot:
        return JobSnapshot("a", 2, text, phase, 0, 10, "running", Figures(prompt_tokens=10))

    async def watch(self):
        try:
            for text in self._texts:
                if self._during:
                    self._during(text)
                yield self.snapshot(text)
            yield self.snapshot(self._texts[-1], "done")
        finally:
            self.left = True


class Chats:
    """The two chats "a" (answering where it has a job) and "b" of the user "ada"."""

    def __init__(self, job: Job | None = None) -> None:
        self.current = job

    async def open_chat(self, who: str, chat: str) -> ChatView:
        if who != "ada" or chat not in ("a", "b"):
            raise ChatNotFound("no such chat")
        job = self.current if chat == "a" else None
        turns = [TurnView(id=1, role="user", text=f"asked in {chat}", status="done", created=0.0, siblings=(1,))]
        turns += (
            [TurnView(id=2, role="assistant", text="", status="running", created=0.0, siblings=(2,))] if job else []
        )
        return ChatView(id=chat, title=chat, settings=ChatSettings(), turns=turns, job=job)

    async def list_chats(self, who: str) -> list[Any]:
        return []

    def default_settings(self) -> ChatSettings:
        return ChatSettings()


@pytest.fixture
def make():
    def make_showing(job: Job | None = None) -> tuple[Showing, Chats]:
        chats = Chats(job)
        showing = Showing(chats, lambda: 0.0)
        names = "chat first chat_list older chatbot notice message stop panel"
        showing.page = SimpleNamespace(**{name: name for name in names.split()}, form=[str(n) for n in range(13)])
        return showing, chats

    return make_showing


async def followed(showing: Showing, tab: str = "tab") -> tuple[list[str], list[dict]]:
    """The texts and the panel values that a tab sees when it follows chat a."""
    texts, panels = [], []
    async for messages, panel in showing.follow(tab, "ada", "a", 0):
        if isinstance(messages, list):
            texts.append(messages[-1]["content"])
        if "turns" in panel:
            panels.append(panel)
    return texts, panels


async def test_a_reply_is_followed_to_its_end_and_says_so(make):
    job = Job(["One", "One two"])
    showing, _ = make(job)
    shown = await showing.show("tab", "ada", "a")
    assert shown["chat_list"]["answering"] is True and shown["chat_list"]["open"] == "a"
    texts, panels = await followed(showing)
    assert texts == ["One", "One two"]
    assert [bool(panel.get("ended")) for panel in panels] == [False, False, True]
    assert job.left


async def test_a_reply_that_ended_before_it_was_followed_is_not_left_running(make):
    showing, chats = make(Job(["One"]))
    await showing.show("tab", "ada", "a")
    chats.current = None
    texts, panels = await followed(showing)
    assert texts == [] and panels[-1]["ended"]


async def test_a_tab_that_shows_another_chat_sees_no_more_of_the_reply(make):
    showing: Showing
    job = Job(["One", "One two", "One two three"], during=lambda text: move() if text == "One two" else None)
    showing, _ = make(job)
    await showing.show("tab", "ada", "a")

    def move() -> None:
        showing._tabs.show("tab", "b")

    texts, panels = await followed(showing)
    assert texts == ["One"]
    assert not any(panel.get("ended") for panel in panels)
    assert job.left, "the watcher must be gone"
    assert await showing.settle("tab", "ada", "a", 0) == showing.nothing()


async def test_two_tabs_follow_the_same_reply(make):
    showing, _ = make(Job(["One"]))
    for tab in ("first", "second"):
        await showing.show(tab, "ada", "a")
    assert (await followed(showing, "first"))[0] == (await followed(showing, "second"))[0] == ["One"]


async def test_somebody_elses_chat_shows_as_a_new_one_with_a_notice(make):
    showing, _ = make(Job(["One"]))
    shown = await showing.show("tab", "bob", "a")
    assert shown["chat"] == "" and shown["chatbot"] == []
    assert "does not exist" in shown["notice"]["text"]


async def test_of_two_quick_picks_only_the_last_shows(make):
    showing, chats = make()
    open_chat = chats.open_chat

    async def slow(who: str, chat: str) -> ChatView:
        if chat == "a":
            await showing_b()
        return await open_chat(who, chat)

    async def showing_b() -> None:
        chats.open_chat = open_chat
        assert (await showing.show("tab", "ada", "b"))["chat"] == "b"

    chats.open_chat = slow
    assert await showing.show("tab", "ada", "a") == showing.nothing()


async def test_a_refusal_is_said_and_changes_nothing_else(make):
    showing, _ = make()

    async def refuse() -> str:
        raise ValueError("max_tokens=0 must be an integer >= 1")

    updates = await showing.answer("tab", "ada", refuse, sent="")
    assert list(updates) == ["notice"] and "max_tokens=0" in updates["notice"]["text"]
