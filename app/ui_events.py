"""What the page's events do: check the arguments, ask ChatService, and show the outcome (page_show.py).

Every handler names its user (ui.py's IDENTIFY fills it in) and returns updates for some of the components. A chat that
is shown while it answers is then followed by one more event, which streams until the job ends or until the same tab
shows something else. Following never owns a job.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import gradio as gr

from app import chat_view
from app.chat import ChatError, ChatNotFound, ChatService, ChatSettings
from app.chat_settings import DEFAULTS
from app.page_arguments import as_message, as_text, as_turn_id, choice_of, event_field, identity
from app.page_show import Edited, Showing, Updates, list_row
from app.page_tabs import Tab
from app.sent_messages import BLANK, SentMessages
from app.settings_form import is_unfilled, left_alone, read_form, show_form
from engine.shown import shown

if TYPE_CHECKING:
    from app.ui import Page


MOST_FOUND = 100  # chats that a search lists
WAITS = "The model is still loading: your message is answered when it is ready."


@dataclass(eq=False, slots=True)
class _UnderWay:
    """A message that has come and was neither taken nor refused yet."""

    user: str
    name: str
    done: asyncio.Event = field(default_factory=asyncio.Event)


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
        self._showing = Showing(chats, prefill_rate)
        self._sent = SentMessages()
        self._messages: list[_UnderWay] = []
        self._retry_load = retry_load
        self._login = login

    @property
    def page(self) -> Page:
        """The components; set once they are laid out."""
        return self._showing.page

    @page.setter
    def page(self, page: Page) -> None:
        self._showing.page = page

    # -- opening -----------------------------------------------------------------------------------------------
    async def open_address(self, request: gr.Request, user: str, address: str, names: str) -> Updates:
        """The page was loaded: show the chat that it names, and say what became of the messages of these names."""
        who, chat = self._who(request, user), as_text(address)
        notice, sent = await self._news(who, names)
        return await self._showing.show(_tab(request, user), who, chat, notice=notice, sent=sent)

    async def resync(
        self, request: gr.Request, event: gr.EventData, user: str, target: str, names: str, first: str, *form: Any
    ) -> Updates:
        """Show the picked chat as it stands now, as far back as before, and say what became of the messages of these
        names. The event's `why`: the page is "back" on its network, the model has become "ready", or the chat went on
        "elsewhere", in another tab, which touches neither what is set here nor what is said. What is set for a chat
        that is still to come stays; once the model is ready, what was left alone follows its defaults."""
        who, chat, why = self._who(request, user), as_text(target), event_field(event, "why")
        notice, news = await self._news(who, names)
        if BLANK.fullmatch(chat):  # its first message may have gone off just before
            chat = await self._sent.became(who, chat)
        tab, first_turn = _tab(request, user), as_turn_id(first)
        if why == "elsewhere":
            notice = None
        updates = await self._showing.show(tab, who, chat, first=first_turn, notice=notice, sent=news)
        if why == "elsewhere":
            return self._showing.without_form(updates)
        if chat or is_unfilled(form):
            return updates
        stale = left_alone(form, DEFAULTS) if why == "ready" else set()
        for i, (control, value) in enumerate(zip(self.page.form, form, strict=False)):
            # An update that changes nothing would only undo what is typed before it arrives.
            if i not in stale or updates.get(control) == value:
                updates.pop(control, None)
        return updates

    async def pick(self, request: gr.Request, event: gr.EventData, user: str) -> Updates:
        who, chat = self._who(request, user), as_text(event_field(event, "id"))
        return await self._showing.show(_tab(request, user), who, chat, notice="")

    async def new(self, request: gr.Request, user: str) -> Updates:
        """A blank page; the chat itself is made by its first message."""
        return await self._showing.show(_tab(request, user), self._who(request, user), "", notice="")

    async def load_older(self, request: gr.Request, user: str, chat: str, first: str) -> Updates:
        who = self._who(request, user)
        view = await self.chats.open_chat(who, as_text(chat))
        return await self._showing.show(
            _tab(request, user), who, view.id, first=chat_view.older(view, as_turn_id(first))
        )

    # -- answering ---------------------------------------------------------------------------------------------
    async def send(
        self, request: gr.Request, user: str, target: str, name: str, leaf: str, chat: str, text: str, *form: Any
    ) -> Updates:
        """Send a text, which the page calls `name`, to `target`: the chat that the reader picked last, whose last turn
        on the page is `leaf`, or the name of a page without one, which becomes a chat. The page may still show `chat`,
        whose settings count only where the two are one."""
        who, text, target, name = self._who(request, user), as_text(text), as_text(target), as_text(name)
        shown_leaf = as_turn_id(leaf)
        is_new = not target or BLANK.fullmatch(target) is not None
        if ("" if is_new else target) != as_text(chat) or is_unfilled(form):
            form = ()
        if not text.strip():
            return self._showing.nothing()

        async def start() -> str:
            with self._under_way(who, name):
                waited = await self.chats.until_loaded()
                async with self._sent.sending(who, target or name, name) as page:
                    if taken := self._sent.taken_by(who, name):
                        return taken
                    if is_new:
                        asked = self._with_defaults_of_now(form) if waited else form
                        page.chat = await self._first_message(who, page.chat, text, asked)
                    else:
                        await self._keep_settings(who, target, form)
                        await self.chats.send(who, target, text, shown_leaf)
                    self._sent.note(who, name, page.chat or target)
                    return page.chat or target

        return await self._showing.answer(_tab(request, user), who, start, name)

    async def say_waiting(self) -> Updates:
        """A message was sent from a page that knows of no model: where that is still loading, `send` waits for it."""
        return {self.page.notice: self._showing.notice(WAITS)} if self.chats.is_loading else self._showing.nothing()

    @contextmanager
    def _under_way(self, who: str, name: str) -> Iterator[None]:
        message = _UnderWay(who, name)
        self._messages.append(message)
        try:
            yield
        finally:
            self._messages.remove(message)
            message.done.set()

    def _with_defaults_of_now(self, form: tuple[Any, ...]) -> tuple[Any, ...]:
        """A form from before the model was loaded, with that one's defaults in what was left alone."""
        stale, now = left_alone(form, DEFAULTS), show_form(self.chats.default_settings())
        return tuple(now[i] if i in stale else value for i, value in enumerate(form))

    async def _news(self, who: str, names: str) -> tuple[str, dict[str, str]]:
        """Of messages that the page has sent: what is to be said of them, and by their names the chats that took them,
        "" where none has. Of one that waits for the model nothing is known yet."""
        mine, waiting = as_text(names).split()[:100], set()
        for message in [one for one in self._messages if one.user == who and one.name in mine]:
            if self.chats.is_loading:
                waiting.add(message.name)
            else:
                await message.done.wait()
        sent = {name: self._sent.taken_by(who, name) for name in mine if name not in waiting}
        return WAITS if waiting else "", sent

    async def _first_message(self, who: str, chat: str, text: str, form: tuple[Any, ...]) -> str:
        """Send to `chat`, made now where it is ""; a refused message leaves no empty chat behind."""
        if form:
            self._form(form)  # a wrong setting is refused before a chat is made
        target = chat or await self.chats.new_chat(who)
        try:
            await self._keep_settings(who, target, form)
            await self.chats.send(who, target, text)
        except ValueError:
            if not chat:
                await self.chats.delete_chat(who, target)
            raise
        return target

    async def edit(
        self, request: gr.Request, event: gr.EventData, user: str, chat: str, first: str, *form: Any
    ) -> Updates:
        """Answer an edited message of the user's, beside the old one."""
        who, chat, text = self._who(request, user), as_text(chat), as_message(event_field(event, "value"))

        async def start() -> str:
            turn = await self._turn_at(who, chat, first, event, event_field(event, "previous_value"))
            await self._keep_settings(who, chat, form)
            await self.chats.edit(who, chat, turn, text)
            return chat

        edited = Edited(chat, as_turn_id(first), text)
        return await self._showing.answer(_tab(request, user), who, start, edited=edited)

    async def retry(
        self, request: gr.Request, event: gr.EventData, user: str, chat: str, first: str, *form: Any
    ) -> Updates:
        """Answer the last message again, beside the old reply."""
        who, chat = self._who(request, user), as_text(chat)

        async def start() -> str:
            turn = await self._turn_at(who, chat, first, event, event_field(event, "value"))
            await self._keep_settings(who, chat, form)
            await self.chats.retry(who, chat, turn)
            return chat

        return await self._showing.answer(_tab(request, user), who, start)

    async def act(self, request: gr.Request, event: gr.EventData, user: str, chat: str, *form: Any) -> Updates:
        """A link under a reply: continue or regenerate it, or open another branch."""
        who, chat = self._who(request, user), as_text(chat)
        actions: dict[str, Callable[[str, str, int], Awaitable[Any]]] = {
            "continue": self.chats.continue_reply,
            "retry": self.chats.retry,
            "branch": self.chats.open_branch,
        }
        action = actions.get(as_text(event_field(event, "kind")))
        if action is None:
            raise gr.Error(
                f"{shown(event_field(event, 'kind'))} is not something a reply can do", print_exception=False
            )

        async def start() -> str:
            await self._keep_settings(who, chat, form)
            await action(who, chat, as_turn_id(event_field(event, "turn")))
            return chat

        return await self._showing.answer(_tab(request, user), who, start)

    async def stop(self, request: gr.Request, user: str, chat: str) -> None:
        """End the open chat's job; the event that follows the job shows how it ended."""
        with suppress(ChatNotFound):  # deleted in another tab
            await self.chats.stop(self._who(request, user), as_text(chat))

    # -- the list of chats ---------------------------------------------------------------------------------------
    async def rename(self, request: gr.Request, event: gr.EventData, user: str) -> Updates:
        who, chat, title = self._who(request, user), event_field(event, "id"), event_field(event, "title")
        updates, _ = await self._showing.after_change(who, self.chats.rename(who, as_text(chat), as_text(title)))
        return updates

    async def remove(self, request: gr.Request, event: gr.EventData, user: str, chat: str) -> Updates:
        who, gone = self._who(request, user), as_text(event_field(event, "id"))
        updates, done = await self._showing.after_change(who, self.chats.delete_chat(who, gone))
        return updates | (await self._showing.show(_tab(request, user), who, "") if done and gone == chat else {})

    async def search(self, request: gr.Request, event: gr.EventData, user: str) -> Updates:
        who, text = self._who(request, user), as_text(event_field(event, "text"))
        value = await self._showing.chats_of(who)
        found = await self.chats.search(who, text, MOST_FOUND + 1)
        rows, more = [list_row(info) for info in found[:MOST_FOUND]], len(found) > MOST_FOUND
        return {self.page.chat_list: {**value, "query": text, "found": rows, "more": more}}

    async def export(self, request: gr.Request, user: str, chat: str) -> Updates:
        who = self._who(request, user)
        view = await self.chats.open_chat(who, as_text(chat))
        text = json.dumps(await self.chats.export_chat(who, view.id), ensure_ascii=False, indent=1)
        name = re.sub(r"[^\w\- ]+", "", view.title).strip()[:60] or "chat"
        value = await self._showing.chats_of(who)
        return {self.page.chat_list: {**value, "download": {"name": f"{name}.json", "text": text, "at": time.time()}}}

    async def bring_in(self, request: gr.Request, event: gr.EventData, user: str) -> Updates:
        who = self._who(request, user)

        async def start() -> str:
            try:
                data = json.loads(as_text(event_field(event, "text")))
            except (ValueError, RecursionError) as error:
                raise ChatError(f"That file is not JSON ({error}); choose one that Export wrote.") from None
            return await self.chats.import_chat(who, data)

        return await self._showing.answer(_tab(request, user), who, start)

    # -- settings ----------------------------------------------------------------------------------------------
    async def change_setting(self, request: gr.Request, user: str, chat: str, *form: Any) -> Updates:
        """Keep the settings as the page shows them; those of a new chat are kept by its first message."""
        who, chat = self._who(request, user), as_text(chat)
        try:
            if not is_unfilled(form):
                self._form(form)
            if chat:
                await self._keep_settings(who, chat, form)
        except ValueError as error:
            return {self.page.notice: self._showing.notice(f"Not kept: {error}")}
        return {self.page.notice: self._showing.notice("")}

    async def _keep_settings(self, who: str, chat: str, form: tuple[Any, ...]) -> None:
        """Keep the settings as the page shows them (none: leave the chat's as they are)."""
        if form and not is_unfilled(form):
            await self.chats.change_settings(who, chat, **asdict(self._form(form)))

    def load_again(self) -> None:
        self._retry_load()

    # -- while it answers --------------------------------------------------------------------------------------
    async def follow(
        self, request: gr.Request, user: str, chat: str, first: str
    ) -> AsyncGenerator[tuple[Any, Any], None]:
        """Stream the shown chat's running reply."""
        who, tab = self._who(request, user), _tab(request, user)
        async with aclosing(self._showing.follow(tab, who, as_text(chat), as_turn_id(first))) as updates:
            async for update in updates:
                yield update

    async def settle(self, request: gr.Request, user: str, chat: str, first: str) -> Updates:
        """After following: show how the reply ended."""
        who, tab = self._who(request, user), _tab(request, user)
        return await self._showing.settle(tab, who, as_text(chat), as_turn_id(first))

    # -- checks ------------------------------------------------------------------------------------------------
    def _who(self, request: gr.Request, user: object) -> str:
        return identity(request, user, self._login)

    def _form(self, form: tuple[Any, ...]) -> ChatSettings:
        return read_form(form, self.chats.default_settings())

    async def _turn_at(self, who: str, chat: str, first: str, event: gr.EventData, text: Any) -> int:
        """The id of the user's turn with this text that the event's message belongs to, if it still stands there."""
        index = event_field(event, "index")
        rendered = chat_view.render(await self.chats.open_chat(who, chat), as_turn_id(first))
        if isinstance(index, int) and 0 <= index < len(rendered.turns):
            turn = rendered.turns[index]
            if turn.role == "user" and chat_view.as_typed(turn.text) == as_message(text):
                return turn.id
        raise ChatError("This chat was changed in another tab: reload the page and try again.")


def _tab(request: gr.Request, user: object) -> Tab:
    return Tab(request.session_hash or "", choice_of(user))
