"""What the page's events do: ask ChatService, then show the open chat and follow its running job.

Every handler names its user (app/ui.py's IDENTIFY fills it in), checks its arguments and yields updates for some of the
components. A handler that shows a chat follows the chat's job until it ends, or until the same tab shows something
else: the newer event takes the tab over and the older one ends without another word. Following never owns a job.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import gradio as gr

from app import chat_view
from app.chat import (
    BlankMessage,
    ChatBusy,
    ChatError,
    ChatNotFound,
    ChatService,
    ChatSettings,
    ChatView,
    ContextFull,
    JobSnapshot,
)
from app.kv_panel import panel_value
from app.settings_form import read_form, show_form

if TYPE_CHECKING:
    from app.ui import Page

log = logging.getLogger(__name__)

Updates = dict[Any, Any]
TABS_REMEMBERED = 10_000
PANEL_SECONDS = 0.5  # between two updates of the panel's turn figures while a reply runs
USER_ID = re.compile(r"[0-9a-f]{32}")


class PageEvents:
    """The handlers. `page` holds the components; `retry_load` starts loading a model that failed to load again;
    `prefill_rate` gives the engine's recent tokens/s; `login` True takes the login as identity."""

    def __init__(
        self,
        chats: ChatService,
        *,
        prefill_rate: Callable[[], float],
        retry_load: Callable[[], None],
        login: bool,
    ) -> None:
        self.chats = chats
        self.page: Page
        self._prefill_rate = prefill_rate
        self._retry_load = retry_load
        self._login = login
        self._tabs: OrderedDict[str, int] = OrderedDict()  # session -> number of its newest showing event
        self._shown = 0
        self._notices = 0

    # -- opening -----------------------------------------------------------------------------------------------
    async def open_address(self, request: gr.Request, user: str, address: str) -> AsyncIterator[Updates]:
        """The page was loaded, or found its connection again: show the chat that it names."""
        who = self._who(request, user)
        async for updates in self._show(request, who, _text(address)):
            yield updates

    async def pick(self, request: gr.Request, event: gr.EventData, user: str) -> AsyncIterator[Updates]:
        who = self._who(request, user)
        async for updates in self._show(request, who, _text(event.id), notice=""):
            yield updates

    async def new(self, request: gr.Request, user: str) -> AsyncIterator[Updates]:
        """A blank page; the chat itself is made by its first message."""
        who = self._who(request, user)
        async for updates in self._show(request, who, "", notice=""):
            yield updates

    async def load_older(self, request: gr.Request, user: str, chat: str, first: str) -> AsyncIterator[Updates]:
        who = self._who(request, user)
        view = await self.chats.open_chat(who, _text(chat))
        async for updates in self._show(request, who, view.id, first=chat_view.older(view, _turn_id(first))):
            yield updates

    # -- answering ---------------------------------------------------------------------------------------------
    async def send(
        self, request: gr.Request, user: str, target: str, chat: str, text: str, *form: Any
    ) -> AsyncIterator[Updates]:
        """Send the message box's text to chat `target` ("": a new one), which the reader may have picked so lately
        that the page still shows `chat`. The settings shown are `chat`'s: they count only where the two are one."""
        who, text, shown = self._who(request, user), _text(text), _text(chat)
        chat = _text(target)
        if chat != shown:
            form = ()
        if not text.strip():
            yield self._nothing()
            return

        async def start() -> str:
            if form:
                self._form(form)  # a wrong setting is refused before a chat is made
            target = chat or await self.chats.new_chat(who)
            try:
                await self._keep_settings(who, target, form)
                await self.chats.send(who, target, text)
            except ValueError:
                if not chat:  # a refused first message leaves no empty chat behind
                    await self.chats.delete_chat(who, target)
                raise
            return target

        async for updates in self._answer(request, who, start, sent=chat):
            yield updates

    async def edit(
        self, request: gr.Request, event: gr.EditData, user: str, chat: str, first: str, *form: Any
    ) -> AsyncIterator[Updates]:
        """Answer an edited message of the user's, beside the old one."""
        who, chat = self._who(request, user), _text(chat)

        async def start() -> str:
            turn = await self._turn_at(who, chat, first, event.index, "user", event.previous_value)
            await self._keep_settings(who, chat, form)
            await self.chats.edit(who, chat, turn, _plain(event.value))
            return chat

        async for updates in self._answer(request, who, start):
            yield updates

    async def retry(
        self, request: gr.Request, event: gr.RetryData, user: str, chat: str, first: str, *form: Any
    ) -> AsyncIterator[Updates]:
        """Answer the last message again, beside the old reply."""
        who, chat = self._who(request, user), _text(chat)

        async def start() -> str:
            turn = await self._turn_at(who, chat, first, event.index, "user", event.value)
            await self._keep_settings(who, chat, form)
            await self.chats.retry(who, chat, turn)
            return chat

        async for updates in self._answer(request, who, start):
            yield updates

    async def act(
        self, request: gr.Request, event: gr.EventData, user: str, chat: str, *form: Any
    ) -> AsyncIterator[Updates]:
        """A link under a reply: continue or regenerate it, or open another branch."""
        who, chat = self._who(request, user), _text(chat)
        actions: dict[str, Callable[[str, str, int], Awaitable[Any]]] = {
            "continue": self.chats.continue_reply,
            "retry": self.chats.retry,
            "branch": self.chats.open_branch,
        }
        action = actions.get(_text(event.kind))
        if action is None:
            raise gr.Error(f"{event.kind!r} is not something a reply can do", print_exception=False)

        async def start() -> str:
            await self._keep_settings(who, chat, form)
            await action(who, chat, _turn_id(event.turn))
            return chat

        async for updates in self._answer(request, who, start):
            yield updates

    async def stop(self, request: gr.Request, user: str, chat: str) -> None:
        """End the open chat's job; the event that follows the job shows how it ended."""
        await self.chats.stop(self._who(request, user), _text(chat))

    # -- the list of chats ---------------------------------------------------------------------------------------
    async def rename(self, request: gr.Request, event: gr.EventData, user: str) -> Updates:
        who = self._who(request, user)
        return await self._listed(who, self.chats.rename(who, _text(event.id), _text(event.title)))

    async def remove(self, request: gr.Request, event: gr.EventData, user: str, chat: str) -> AsyncIterator[Updates]:
        who, gone = self._who(request, user), _text(event.id)
        yield await self._listed(who, self.chats.delete_chat(who, gone))
        if gone == chat:
            async for blank in self._show(request, who, ""):
                yield blank

    async def search(self, request: gr.Request, event: gr.EventData, user: str) -> Updates:
        who, text = self._who(request, user), _text(event.text)
        value = await self._list(who)
        found = await self.chats.search(who, text)
        return {self.page.chat_list: {**value, "query": text, "found": [_row(info) for info in found]}}

    async def export(self, request: gr.Request, user: str, chat: str) -> Updates:
        who = self._who(request, user)
        view = await self.chats.open_chat(who, _text(chat))
        text = json.dumps(await self.chats.export_chat(who, view.id), ensure_ascii=False, indent=1)
        name = re.sub(r"[^\w\- ]+", "", view.title).strip()[:60] or "chat"
        value = await self._list(who)
        return {self.page.chat_list: {**value, "download": {"name": f"{name}.json", "text": text, "at": time.time()}}}

    async def bring_in(self, request: gr.Request, event: gr.EventData, user: str) -> AsyncIterator[Updates]:
        who = self._who(request, user)

        async def start() -> str:
            try:
                data = json.loads(_text(event.text))
            except ValueError as error:
                raise ChatError(f"That file is not JSON ({error}); choose one that Export wrote.") from None
            return await self.chats.import_chat(who, data)

        async for updates in self._answer(request, who, start):
            yield updates

    # -- settings ----------------------------------------------------------------------------------------------
    async def change_setting(self, request: gr.Request, user: str, chat: str, *form: Any) -> Updates:
        """Keep the settings as the page shows them; those of a new chat are kept by its first message."""
        who, chat = self._who(request, user), _text(chat)
        try:
            self._form(form)
            if chat:
                await self._keep_settings(who, chat, form)
        except ValueError as error:
            return {self.page.notice: self._notice(f"Not kept: {error}")}
        return {self.page.notice: self._notice("")}

    async def _keep_settings(self, who: str, chat: str, form: tuple[Any, ...]) -> None:
        """Keep the settings as the page shows them (none: leave the chat's as they are)."""
        if form:
            await self.chats.change_settings(who, chat, **asdict(self._form(form)))

    def load_again(self) -> None:
        self._retry_load()

    # -- showing -----------------------------------------------------------------------------------------------
    async def _answer(
        self,
        request: gr.Request,
        who: str,
        start: Callable[[], Awaitable[str]],
        sent: str | None = None,
    ) -> AsyncIterator[Updates]:
        """Do `start`, which returns the chat to show, and show it; a refusal is said and changes nothing else.

        sent: the chat id under which the page kept the draft that this sends.
        """
        try:
            target = await start()
        except BlankMessage:
            yield self._nothing()
            return
        except ValueError as error:
            yield {self.page.notice: self._notice(_refusal(error))}
            return
        async for updates in self._show(request, who, target, notice="", sent=sent):
            yield updates

    async def _show(
        self,
        request: gr.Request,
        who: str,
        chat: str,
        *,
        first: int = 0,
        notice: str | None = None,
        sent: str | None = None,
    ) -> AsyncIterator[Updates]:
        """Show a chat ("": a new one) and follow its job.

        The last thing yielded is repeated by Gradio when the event ends; so controls that the reader may have touched
        since (settings, message box) are in the first update only.
        """
        mine = self._take_tab(request)
        try:
            view = await self.chats.open_chat(who, chat) if chat else None
        except ChatNotFound:
            view = None
            notice = "That chat does not exist here: it was deleted, or belongs to somebody else."
        page = self.page
        form = show_form(view.settings if view else self.chats.default_settings())
        rendered = chat_view.render(view, first) if view else chat_view.Rendered()
        first = rendered.first
        whole = self._body(view, rendered) | dict(zip(page.form, form, strict=True))
        whole |= {
            page.chat: view.id if view else "",
            page.first: str(first),
            page.older: gr.update(visible=rendered.hidden > 0, value=f"Load older ({rendered.hidden} more)"),
            page.chat_list: await self._list(who) | {"open": view.id if view else "", "sent": sent},
        }
        if sent is not None:
            whole[page.message] = ""
        if notice is not None:
            whole[page.notice] = self._notice(notice)
        if not self._has_tab(request, mine):
            yield self._nothing()
            return
        yield whole
        if view is not None and view.job is not None:
            async with aclosing(self._follow(view, first)) as updates:
                async for update in updates:
                    if not self._has_tab(request, mine):
                        break
                    yield update
        if view is None or view.job is None or not self._has_tab(request, mine):
            yield self._nothing()
            return
        try:
            view = await self.chats.open_chat(who, view.id)
        except ChatNotFound:  # deleted while it answered; the deletion shows a blank page
            yield self._nothing()
            return
        yield self._body(view, chat_view.render(view, first)) | {page.chat_list: await self._list(who)}

    async def _follow(self, view: ChatView, first: int) -> AsyncGenerator[Updates, None]:
        assert view.job is not None
        page, panel_at, panel = self.page, 0.0, {}
        async with aclosing(view.job.watch()) as snapshots:
            async for snapshot in snapshots:
                if snapshot.done:
                    return
                if time.monotonic() - panel_at >= PANEL_SECONDS or snapshot.phase != "decode":
                    panel_at, panel = time.monotonic(), self._panel(view, snapshot)
                yield {page.chatbot: chat_view.render(view, first, snapshot).messages, page.panel: panel}

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

    async def _list(self, who: str) -> dict[str, Any]:
        """The value of the list of chats. Only an event that shows a chat adds its id as "open", with "sent": the id
        under which the page kept the draft that was sent (None: none was)."""
        return {"chats": [_row(info) for info in await self.chats.list_chats(who)]}

    async def _listed(self, who: str, change: Awaitable[Any]) -> Updates:
        """Do a change to the list of chats and show the list; a refusal is said."""
        notice = ""
        try:
            await change
        except ValueError as error:
            notice = str(error)
        return {self.page.chat_list: await self._list(who), self.page.notice: self._notice(notice)}

    def _notice(self, text: str) -> dict[str, Any]:
        """The notice's value; the number makes the same words twice two notices."""
        self._notices += 1
        return {"text": text, "number": self._notices}

    def _nothing(self) -> Updates:
        return {self.page.notice: gr.skip()}

    # -- checks ------------------------------------------------------------------------------------------------
    def _who(self, request: gr.Request, user: object) -> str:
        """The user's identity: the login where there is one, else the browser's random id."""
        if self._login:
            if not request.username:
                raise gr.Error("Log in first.", print_exception=False)
            return f"login:{request.username}"
        if not isinstance(user, str) or not USER_ID.fullmatch(user):
            raise gr.Error("This browser sent no valid id: reload the page.", print_exception=False)
        return user

    def _form(self, form: tuple[Any, ...]) -> ChatSettings:
        return read_form(form, self.chats.default_settings())

    async def _turn_at(self, who: str, chat: str, first: str, index: Any, role: str, text: Any) -> int:
        """The id of the turn that message `index` on the page belongs to, if it still stands there."""
        rendered = chat_view.render(await self.chats.open_chat(who, chat), _turn_id(first))
        if isinstance(index, int) and 0 <= index < len(rendered.turns):
            turn = rendered.turns[index]
            if turn.role == role and turn.text == _plain(text):
                return turn.id
        raise ChatError("This chat was changed in another tab: reload the page and try again.")

    def _take_tab(self, request: gr.Request) -> int:
        self._shown += 1
        self._tabs[request.session_hash or ""] = self._shown
        self._tabs.move_to_end(request.session_hash or "")
        while len(self._tabs) > TABS_REMEMBERED:
            self._tabs.popitem(last=False)
        return self._shown

    def _has_tab(self, request: gr.Request, number: int) -> bool:
        return self._tabs.get(request.session_hash or "") == number


def _row(info: Any) -> dict[str, Any]:
    return {"id": info.id, "title": info.title, "answering": info.answering, "snippet": info.snippet}


def _text(value: object) -> str:
    """An argument that must be text: the page's endpoints are open to anything."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise gr.Error(f"{value!r} is not text", print_exception=False)
    return value


def _plain(value: Any) -> str:
    """The text of a Chatbot message: a string, or a list of text parts."""
    if isinstance(value, list):
        return "".join(part.get("text", "") if isinstance(part, dict) else _text(part) for part in value)
    return _text(value)


def _turn_id(value: object) -> int:
    try:
        return int(value or 0)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise gr.Error(f"{value!r} is not a turn of a chat", print_exception=False) from None


def _refusal(error: ValueError) -> str:
    """The words for a refusal; where there is a way on, it is named."""
    if isinstance(error, ContextFull):
        return f"{error} Start a new chat, or tick “Leave out older turns” in the settings. Your text is kept."
    if isinstance(error, ChatBusy):
        return f"{error} Your text is kept."
    return str(error)
