"""Showing a chat: what a tab gets when it follows a reply, also when the reply or the tab has moved on meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.chat import ChatError, ChatNotFound, ChatSettings, ChatView, Figures, JobSnapshot, TurnView
from app.page_show import GONE, MAX_FOLLOWERS, Showing
from app.page_tabs import Tab

TAB = Tab("tab")


class Job:
    """A reply of the given texts; `during` is called before each of them is seen."""

    num_watchers = 0

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

    def unsaved(self, who: str, chat: str) -> None:
        return None

    async def list_chats(self, who: str, limit: int) -> list[Any]:
        return []

    def default_settings(self) -> ChatSettings:
        return ChatSettings()


def page_parts() -> Any:
    """A page whose components are their names."""
    names = "chat first chat_list older chatbot notice message stop panel"
    return SimpleNamespace(**{name: name for name in names.split()}, form=[str(n) for n in range(13)])


@pytest.fixture
def make():
    def make_showing(job: Job | None = None) -> tuple[Showing, Chats]:
        chats = Chats(job)
        showing = Showing(chats, lambda: 0.0)
        showing.page = page_parts()
        return showing, chats

    return make_showing


async def followed(showing: Showing, tab: Tab = TAB) -> tuple[list[str], list[dict]]:
    """The texts and the panel values that a tab sees when it follows chat a."""
    texts, panels = [], []
    async for messages, panel in showing.follow(tab, "ada", "a", 0):
        if isinstance(messages, list):
            texts.append(messages[-1]["content"][0]["text"])
        if "turns" in panel:
            panels.append(panel)
    return texts, panels


async def test_a_reply_has_a_limited_number_of_followers(make):
    job = Job(["a"])
    showing, _ = make(job)
    await showing.show(TAB, "ada", "a")
    job.num_watchers = MAX_FOLLOWERS
    with pytest.raises(ChatError, match=f"{MAX_FOLLOWERS} tabs follow this reply"):
        await followed(showing)


async def test_a_reply_is_followed_to_its_end_and_says_so(make):
    job = Job(["One", "One two"])
    showing, _ = make(job)
    shown = await showing.show(TAB, "ada", "a")
    assert shown["chat_list"]["answering"] is True and shown["chat_list"]["open"] == "a"
    texts, panels = await followed(showing)
    assert texts == ["One", "One two"]
    assert [bool(panel.get("ended")) for panel in panels] == [False, False, True]
    assert job.left


async def test_a_reply_that_ended_before_it_was_followed_is_not_left_running(make):
    showing, chats = make(Job(["One"]))
    await showing.show(TAB, "ada", "a")
    chats.current = None
    texts, panels = await followed(showing)
    assert texts == [] and panels[-1]["ended"]


async def test_a_tab_that_shows_another_chat_sees_no_more_of_the_reply(make):
    showing: Showing
    job = Job(["One", "One two", "One two three"], during=lambda text: move() if text == "One two" else None)
    showing, _ = make(job)
    await showing.show(TAB, "ada", "a")

    def move() -> None:
        showing._tabs.show(TAB, "b")

    texts, panels = await followed(showing)
    assert texts == ["One"]
    assert not any(panel.get("ended") for panel in panels)
    assert job.left, "the watcher must be gone"
    assert await showing.settle(TAB, "ada", "a", 0) == showing.nothing()


async def test_two_tabs_follow_the_same_reply(make):
    showing, _ = make(Job(["One"]))
    first, second = Tab("first"), Tab("second")
    for tab in (first, second):
        await showing.show(tab, "ada", "a")
    assert (await followed(showing, Tab("first")))[0] == (await followed(showing, Tab("second")))[0] == ["One"]


async def test_somebody_elses_chat_shows_as_a_new_one_with_a_notice(make):
    showing, _ = make(Job(["One"]))
    shown = await showing.show(TAB, "bob", "a")
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
        assert (await showing.show(TAB, "ada", "b"))["chat"] == "b"

    chats.open_chat = slow
    assert await showing.show(TAB, "ada", "a") == showing.nothing()


async def test_a_refusal_is_said_and_changes_nothing_else(make):
    showing, _ = make()

    async def refuse() -> str:
        raise ValueError("max_tokens=0 must be an integer >= 1")

    updates = await showing.answer(TAB, "ada", refuse, "m")
    assert list(updates) == ["notice"] and "max_tokens=0" in updates["notice"]["text"]
    assert updates["notice"]["refused"] == "m"  # its text stays in the box


async def test_what_the_reader_turns_to_while_a_message_is_sent_stays_and_the_message_is_known_as_sent(make):
    showing, chats = make()
    await showing.show(TAB, "ada", "a")

    async def send_and_turn_to_b() -> str:
        assert (await showing.show(Tab("tab", 1), "ada", "b"))["chat"] == "b"
        return "a"

    updates = await showing.answer(TAB, "ada", send_and_turn_to_b, "m")
    assert updates.keys() == {"chat_list"} and updates["chat_list"]["sent"] == {"m": "a"}
    assert "open" not in updates["chat_list"]
    # What was picked before, but arrives later, shows no more, either.
    assert await showing.show(TAB, "ada", "a") == showing.nothing()

    async def send_and_refresh() -> str:
        await showing.show(Tab("tab", 1), "ada", "b")
        return "b"

    updates = await showing.answer(Tab("tab", 1), "ada", send_and_refresh, "n")
    assert updates["chat"] == "b" and updates["chat_list"]["sent"] == {"n": "b"} and updates["chat_list"]["choice"] == 1

    open_chat = chats.open_chat

    async def refreshed(who: str, chat: str) -> ChatView:
        chats.open_chat = open_chat
        await showing.show(Tab("tab", 1), "ada", "b")
        return await open_chat(who, chat)

    chats.open_chat = refreshed
    updates = await showing.show(Tab("tab", 1), "ada", "b", sent={"o": "b"})
    assert updates.keys() == {"chat_list"} and updates["chat_list"]["sent"] == {"o": "b"}


async def test_a_chat_that_was_deleted_elsewhere_while_it_answered_gives_way_to_a_new_page(make):
    showing, chats = make()
    await showing.show(TAB, "ada", "a")

    async def gone(who: str, chat: str) -> ChatView:
        raise ChatNotFound("no such chat")

    chats.open_chat = gone
    updates = await showing.settle(TAB, "ada", "a", 0)
    assert updates.keys() == {"chat_list"} and updates["chat_list"]["gone"] == "a"  # then the page asks for it
    updates = await showing.show(TAB, "ada", "a")
    assert updates["chat"] == "" and updates["notice"]["text"] == GONE
    await showing.show(TAB, "ada", "")
    assert await showing.settle(TAB, "ada", "a", 0) == showing.nothing()  # the tab shows a new page by now
