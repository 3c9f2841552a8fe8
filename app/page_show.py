"""Showing a chat on the page: the updates for its components, all at once, streamed while it answers, and at the end.

Every method names the tab (Gradio's session hash) that it updates; what a tab shows is decided by its newest event.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import gradio as gr

from app import chat_view
from app.chat import (
    BlankMessage,
    ChatBusy,
    ChatInfo,
    ChatNotFound,
    ChatService,
    ChatView,
    ContextFull,
    JobSnapshot,
    ModelNotReady,
)
from app.kv_panel import panel_value
from app.page_tabs import Tabs
from app.settings_form import show_form

if TYPE_CHECKING:
    from app.ui import Page

Updates = dict[Any, Any]
PANEL_SECONDS = 0.5  # between two updates of the panel's turn figures while a reply runs


class Showing:
    """`page` holds the components; `prefill_rate` gives the engine's recent prefill tokens/s, 0 where unknown."""

    def __init__(self, chats: ChatService, prefill_rate: Callable[[], float]) -> None:
        self.page: Page
        self._chats = chats
        self._prefill_rate = prefill_rate
        self._tabs = Tabs()
        self._notices = 0

    async def show(
        self,
        tab: str,
        who: str,
        chat: str,
        *,
        first: int = 0,
        notice: str | None = None,
        sent: str | None = None,
    ) -> Updates:
        """Show a chat ("": a new one), from turn `first` on (0: its last turns).

        notice: what is said above the message box (None: what stands there stays). sent: the id under which the page
        kept the draft that was sent ("": a new chat's; None: nothing was).
        """
        number = self._tabs.show(tab, chat)
        try:
            view = await self._chats.open_chat(who, chat) if chat else None
        except ChatNotFound:
            view = None
            notice = "That chat does not exist here: it was deleted, or belongs to somebody else."
        page, opened = self.page, view.id if view else ""
        form = show_form(view.settings if view else self._chats.default_settings())
        rendered = chat_view.render(view, first) if view else chat_view.Rendered()
        state = {"open": opened, "sent": sent, "answering": view is not None and view.job is not None}
        updates = self._body(view, rendered) | dict(zip(page.form, form, strict=True))
        updates |= {
            page.chat: opened,
            page.first: str(rendered.first),
            page.older: gr.update(visible=rendered.hidden > 0, value=f"Load older ({rendered.hidden} more)"),
            page.chat_list: await self.chats_of(who) | state,
        }
        if sent is not None:
            updates[page.message] = ""
        if notice is not None:
            updates[page.notice] = self.notice(notice)
        return updates if self._tabs.is_newest(tab, number) else self.nothing()

    async def answer(self, tab: str, who: str, start: Callable[[], Awaitable[str]], sent: str | None = None) -> Updates:
        """Do `start`, which returns the chat to show, and show it; a refusal is said and changes nothing else."""
        try:
            chat = await start()
        except BlankMessage:
            return self.nothing()
        except ValueError as error:
            return {self.page.notice: self.notice(_refusal(error))}
        return await self.show(tab, who, chat, notice="", sent=sent)

    async def follow(self, tab: str, who: str, chat: str, first: int) -> AsyncGenerator[tuple[Any, Any], None]:
        """Stream the shown chat's running reply as (messages, panel), until it ends or the tab shows something else.

        These two outputs are all it has: Gradio spends a millisecond of every update on each output left as it is.
        When the reply has ended, the panel's value says "ended", and the page asks for the rest (`settle`). It does not
        where only the connection broke, as it would with an event chained to this one.
        """
        number = self._tabs.follow(tab, chat)
        if number:
            view = await self._chats.open_chat(who, chat)
            panel, panel_at = self._panel(view, None), 0.0
            if view.job is not None:  # else it ended after the event that showed the chat
                async with aclosing(view.job.watch()) as snapshots:
                    async for snapshot in snapshots:
                        if snapshot.done or not self._tabs.is_newest(tab, number):
                            break
                        if time.monotonic() - panel_at >= PANEL_SECONDS or snapshot.phase != "decode":
                            panel, panel_at = self._panel(view, snapshot), time.monotonic()
                        yield chat_view.render(view, first, snapshot).messages, panel
            if self._tabs.is_newest(tab, number):
                yield gr.skip(), panel | {"ended": number}
        # Gradio repeats the last update when the event ends; by then the tab may show something else.
        yield gr.skip(), gr.skip()

    async def settle(self, tab: str, who: str, chat: str, first: int) -> Updates:
        """After following: how the reply ended."""
        try:
            view = await self._chats.open_chat(who, chat)
        except ChatNotFound:  # deleted while it answered; the deletion shows a blank page
            return self.nothing()
        listed = await self.chats_of(who)
        if self._tabs.shows(tab) != chat:
            return self.nothing()
        return self._body(view, chat_view.render(view, first)) | {self.page.chat_list: listed}

    async def after_change(self, who: str, change: Awaitable[Any]) -> Updates:
        """Do a change to the list of chats and show the list; a refusal is said."""
        notice = ""
        try:
            await change
        except ValueError as error:
            notice = str(error)
        return {self.page.chat_list: await self.chats_of(who), self.page.notice: self.notice(notice)}

    async def chats_of(self, who: str) -> dict[str, Any]:
        """The value of the list of chats. Only `show` adds "open", the id of the chat shown."""
        return {"chats": [list_row(info) for info in await self._chats.list_chats(who)]}

    def notice(self, words: str) -> dict[str, Any]:
        """The notice's value; its number makes the same words twice two notices."""
        self._notices += 1
        return {"text": words, "number": self._notices}

    def nothing(self) -> Updates:
        """Updates that change nothing; Gradio takes no empty ones."""
        return {self.page.notice: gr.skip()}

    def _body(self, view: ChatView | None, rendered: chat_view.Rendered) -> Updates:
        snapshot = view.job.snapshot() if view and view.job else None
        if view and snapshot:
            rendered = chat_view.render(view, rendered.first, snapshot)
        return {
            self.page.chatbot: rendered.messages,
            self.page.panel: self._panel(view, snapshot),
            self.page.stop: gr.update(visible=view is not None and view.job is not None),
        }

    def _panel(self, view: ChatView | None, snapshot: JobSnapshot | None) -> dict[str, Any]:
        return panel_value(view, snapshot, self._prefill_rate())


def list_row(info: ChatInfo) -> dict[str, Any]:
    """A chat as assets/page.js lists it."""
    return {"id": info.id, "title": info.title, "answering": info.answering, "snippet": info.snippet}


def _refusal(error: ValueError) -> str:
    """The words for a refusal; where there is a way on, it is named."""
    if isinstance(error, ContextFull):
        return f"{error} Start a new chat, or tick “Leave out older turns” in the settings. Your text is kept."
    if isinstance(error, ChatBusy | ModelNotReady):
        return f"{str(error)[:1].upper()}{str(error)[1:]}. Your text is kept."
    return str(error)
