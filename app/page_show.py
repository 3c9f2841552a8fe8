"""Showing a chat on the page: the updates for its components, all at once, streamed while it answers, and at the end.

Every method names the tab that it updates; what a tab shows is decided by its newest event.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

import gradio as gr

from app import chat_view
from app.chat import (
    BlankMessage,
    ChatBusy,
    ChatError,
    ChatInfo,
    ChatNotFound,
    ChatService,
    ChatView,
    ContextFull,
    JobSnapshot,
    ModelNotReady,
    ReplyUnsaved,
)
from app.kv_panel import panel_value
from app.page_tabs import Tab, Tabs
from app.settings_form import show_form

if TYPE_CHECKING:
    from app.ui import Page

Updates = dict[Any, Any]
MAX_FOLLOWERS = 100  # tabs of one reply
MOST_LISTED = 200  # chats
PANEL_SECONDS = 0.5  # between two updates of the panel's turn figures while a reply runs
GONE = "That chat does not exist here: it was deleted, or belongs to somebody else."
GONE_SECONDS = 1.0  # between two looks whether a tab still shows the reply that is to be saved


class Edited(NamedTuple):
    """An edit of a message: the chat, the first turn that the page shows of it, and the message's new text."""

    chat: str
    first: int
    text: str


class Showing:
    """`page` holds the components; `prefill_rate` gives the engine's recent prefill tokens/s, 0 where unknown."""

    def __init__(self, chats: ChatService, prefill_rate: Callable[[], float]) -> None:
        self.page: Page
        self._chats = chats
        self._prefill_rate = prefill_rate
        self._tabs = Tabs()
        self._notices = self._endings = self._lists = 0
        self._since = secrets.token_hex(4)  # numbers are counted since this server's start

    async def show(
        self,
        tab: Tab,
        who: str,
        chat: str,
        *,
        first: int = 0,
        notice: str | None = None,
        sent: dict[str, str] | None = None,
    ) -> Updates:
        """Show a chat ("": a new one), from turn `first` on (0: its last turns).

        notice: what is said above the message box (None: what stands there stays). sent: of messages that the page has
        sent, by their names, the chats that took them ("": none did).
        """
        if not (number := self._tabs.show(tab, chat)):
            return await self._only_sent(who, sent)
        try:
            view = await self._chats.open_chat(who, chat) if chat else None
        except ChatNotFound:
            view, notice = None, GONE
        page, opened = self.page, view.id if view else ""
        form = show_form(view.settings if view else self._chats.default_settings())
        rendered = chat_view.render(view, first) if view else chat_view.Rendered()
        changing = view is not None and (view.job is not None or view.unsaved is not None)
        state = {"open": opened, "leaf": view.leaf if view else 0, "choice": tab.choice, "answering": changing}
        state |= {"sent": sent, "of": self._of(number), "form": True}
        updates = self._body(view, rendered, number) | dict(zip(page.form, form, strict=True))
        updates |= {
            page.chat: opened,
            page.first: str(rendered.first),
            page.older: gr.update(visible=rendered.hidden > 0, value=f"Load older ({rendered.hidden} more)"),
            page.chat_list: await self.chats_of(who) | state,
        }
        if notice is not None:
            updates[page.notice] = self.notice(notice)
        return updates if self._tabs.is_newest(tab, number) else await self._only_sent(who, sent)

    async def _only_sent(self, who: str, sent: dict[str, str] | None) -> Updates:
        """Where the tab shows something else by now: what was sent is no draft any more all the same."""
        return {self.page.chat_list: await self.chats_of(who) | {"sent": sent}} if sent else self.nothing()

    async def answer(
        self,
        tab: Tab,
        who: str,
        start: Callable[[], Awaitable[str]],
        message: str = "",
        *,
        edited: Edited | None = None,
    ) -> Updates:
        """Do `start`, which returns the chat to show, and show it, unless the reader turns to another one meanwhile; a
        refusal is said and changes nothing else. message: the name of the one that is sent by it. edited: what it is
        to change."""
        try:
            chat = await start()
        except ValueError as error:
            if edited is not None:
                return await self._take_back(tab, who, edited, error)
            if isinstance(error, BlankMessage):
                return self.nothing()
            return {self.page.notice: self.notice(_refusal(error), message, busy=isinstance(error, ChatBusy))}
        sent = {message: chat} if message else None
        if self._tabs.has_turned(tab):
            return await self._only_sent(who, sent)
        return await self.show(tab, who, chat, notice="", sent=sent)

    async def _take_back(self, tab: Tab, who: str, edited: Edited, error: ValueError) -> Updates:
        """After an edit that was refused: Gradio shows the message as edited already, and asks by that."""
        blank = isinstance(error, BlankMessage)
        words = "A message cannot be blank: it stays as it was." if blank else _refusal(error, kept=False)
        notice = self.notice(words, draft="" if blank else edited.text, busy=isinstance(error, ChatBusy))
        updates = await self.show(tab, who, edited.chat, first=edited.first)
        return self.without_form(updates) | {self.page.notice: notice}

    def without_form(self, updates: Updates) -> Updates:
        """Updates of show() that leave the settings as they stand on the page."""
        rest = {component: update for component, update in updates.items() if component not in self.page.form}
        if self.page.chat_list in rest:
            rest[self.page.chat_list] = rest[self.page.chat_list] | {"form": False}
        return rest

    async def follow(self, tab: Tab, who: str, chat: str, first: int) -> AsyncGenerator[tuple[Any, Any], None]:
        """Stream the shown chat's running reply as (messages, panel), until it ends or the tab shows something else.

        These two outputs are all it has: Gradio spends a millisecond of every update on each output left as it is.
        When the reply has ended, the panel's value says "ended", and the page asks for the rest (`settle`). It does not
        where only the connection broke, as it would with an event chained to this one. A reply that could not be
        saved then is followed on, and "ended" said once more when it is on disk.
        """
        number = self._tabs.follow(tab, chat)
        if number:
            view = await self._chats.open_chat(who, chat)
            panel, panel_at = self._panel(view, None, number), 0.0
            known: dict[int, list[dict[str, Any]]] = {}
            if view.job is not None:  # else it ended after the event that showed the chat
                if view.job.num_watchers >= MAX_FOLLOWERS:
                    what = f"{MAX_FOLLOWERS} tabs follow this reply, which is the limit"
                    raise ChatError(f"{what}; reload when it has ended")
                async with aclosing(view.job.watch()) as snapshots:
                    async for snapshot in snapshots:
                        if snapshot.done or not self._tabs.is_newest(tab, number):
                            break
                        if time.monotonic() - panel_at >= PANEL_SECONDS or snapshot.phase != "decode":
                            panel, panel_at = self._panel(view, snapshot, number), time.monotonic()
                        yield chat_view.render(view, first, snapshot, known).messages, panel
            unsaved = self._chats.unsaved(who, chat)
            if self._tabs.is_newest(tab, number):
                yield gr.skip(), panel | self._ended()
            while unsaved is not None and self._tabs.is_newest(tab, number):
                if await unsaved.settled_within(GONE_SECONDS):
                    unsaved = None
                    yield gr.skip(), panel | self._ended()
        # Gradio repeats the last update when the event ends; by then the tab may show something else.
        yield gr.skip(), gr.skip()

    async def settle(self, tab: Tab, who: str, chat: str, first: int) -> Updates:
        """After following: how the reply ended."""
        try:
            view = await self._chats.open_chat(who, chat)
        except ChatNotFound:
            view = None
        listed = await self.chats_of(who)
        if self._tabs.shows(tab) != chat:
            return self.nothing()
        if view is None:  # deleted in another tab while it answered
            return {self.page.chat_list: listed | {"gone": chat}}
        body = self._body(view, chat_view.render(view, first), self._tabs.newest(tab))
        return body | {self.page.chat_list: listed}

    async def after_change(self, who: str, change: Awaitable[Any]) -> tuple[Updates, bool]:
        """Do a change to the list of chats and show the list; a refusal is said. Returns the updates, and whether it
        was done."""
        notice, done = "", True
        try:
            await change
        except ValueError as error:
            notice, done = str(error), False
        return {self.page.chat_list: await self.chats_of(who), self.page.notice: self.notice(notice)}, done

    async def chats_of(self, who: str) -> dict[str, Any]:
        """The value of the list of chats. Only `show` adds "open", the id of the chat shown, and its "leaf": where the
        list has another one, the chat went on in another tab, and the page asks for it anew. "form": its settings are
        shown anew, too.

        "number": of two lists that arrive in the other order the page keeps the one that was asked for later."""
        self._lists += 1
        number = self._lists
        chats = [list_row(info) for info in await self._chats.list_chats(who, MOST_LISTED)]
        older = 0 if len(chats) < MOST_LISTED else await self._chats.count_chats(who) - len(chats)
        return {"chats": chats, "older": older, "since": self._since, "number": number}

    def notice(self, words: str, message: str = "", *, draft: str = "", busy: bool = False) -> dict[str, Any]:
        """The notice's value; its number makes the same words twice two notices. message: the name of the one that was
        refused. draft: a text for the message box, if there is none in it. busy: it holds only while the chat answers,
        and the page takes it back then."""
        self._notices += 1
        return {"text": words, "number": self._notices, "refused": message, "draft": draft, "busy": busy}

    def nothing(self) -> Updates:
        """Updates that change nothing; Gradio takes no empty ones."""
        return {self.page.notice: gr.skip()}

    def _ended(self) -> dict[str, int]:
        """What makes the page ask for the rest of a reply; its number makes two ends of the same two."""
        self._endings += 1
        return {"ended": self._endings}

    def _of(self, number: int) -> dict[str, Any]:
        """Which event an update is of. Two may arrive in the other order: the page shows the newer one's again."""
        return {"since": self._since, "number": number}

    def _body(self, view: ChatView | None, rendered: chat_view.Rendered, number: int) -> Updates:
        snapshot = view.job.snapshot() if view and view.job else None
        if view and snapshot:
            rendered = chat_view.render(view, rendered.first, snapshot)
        return {
            self.page.chatbot: rendered.messages,
            self.page.panel: self._panel(view, snapshot, number),
            self.page.stop: gr.update(visible=view is not None and view.job is not None),
        }

    def _panel(self, view: ChatView | None, snapshot: JobSnapshot | None, number: int) -> dict[str, Any]:
        return panel_value(view, snapshot, self._prefill_rate()) | {"of": self._of(number)}


def list_row(info: ChatInfo) -> dict[str, Any]:
    """A chat as assets/page.js lists it; by the owners the panel tells the reader's other chats from strangers'."""
    return {
        "id": info.id,
        "title": info.title,
        "answering": info.answering,
        "snippet": info.snippet,
        "owner": info.owner,
        "leaf": info.leaf,
    }


def _refusal(error: ValueError, *, kept: bool = True) -> str:
    """The words for a refusal. kept: of what stands in the message box."""
    if isinstance(error, ChatBusy | ContextFull | ModelNotReady | ReplyUnsaved):
        return f"{str(error)[:1].upper()}{str(error)[1:]}.{' Your text is kept.' if kept else ''}"
    return str(error)
