"""ChatService: what new, send, edit, retry, branch, continue and stop mean for a user's chats.

Every call names the user, and a chat or turn that is not this user's does not exist for the call (ChatNotFound).
All methods run on the server's event loop. Refusals are ValueError (mostly ChatError) with one line for the page;
a refused send, edit, retry or continue has written nothing, so the page keeps the draft.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from app.chat_settings import DEFAULTS, SMALL_MODEL_DEFAULTS, ChatSettings
from app.errors import BlankMessage, ChatBusy, ChatError, ChatNotFound, ContextFull, ModelNotReady, ReplyUnsaved
from app.figures import Figures
from app.jobs import Job, JobSnapshot
from app.owner_slots import OwnerSlots
from app.portable import from_portable, to_portable
from app.records import ChatRow, TurnRow
from app.replies import Replies, context_limit
from app.store import NotFound, Store
from app.text import message_text, storable, title_text
from app.thinking import ThinkingSplit, split_thinking
from app.unsaved import UnsavedReply
from app.views import ChatInfo, ChatView, TurnView, branch_to, can_continue, context_used, turn_views

if TYPE_CHECKING:
    from engine.engine_thread import EngineThread

__all__ = [
    "BlankMessage",
    "ChatBusy",
    "ChatError",
    "ChatInfo",
    "ChatNotFound",
    "ChatService",
    "ChatSettings",
    "ChatView",
    "ContextFull",
    "Figures",
    "Job",
    "JobSnapshot",
    "ModelNotReady",
    "ReplyUnsaved",
    "ThinkingSplit",
    "TurnView",
    "split_thinking",
]

MAX_USER_CHARS = 200
_LOAD_POLL = 0.1  # seconds


class ChatService:
    """All chats of all users, and their running jobs."""

    def __init__(
        self, store: Store, engine: EngineThread, abandon_after: float | None = None, *, isolate_users: bool = False
    ) -> None:
        """abandon_after: seconds a job may run without a watcher, None for ever. isolate_users: no KV block that
        one user's chat wrote serves another's."""
        self._store = store
        self._engine = engine
        self._owners = OwnerSlots()
        self._replies = Replies(store, engine, abandon_after, isolate_users=isolate_users)
        self._loaded: asyncio.Task[None] | None = None

    # -- the model ---------------------------------------------------------------------------------------------
    @property
    def is_loading(self) -> bool:
        """The model is neither loaded nor has failed to be."""
        status = self._engine.status()
        return not status.ready and not status.error

    async def until_loaded(self) -> bool:
        """Wait while the model is being loaded; whether that took any time. Who waits first goes on first."""
        if not self.is_loading:
            return False
        if self._loaded is None or self._loaded.done():
            self._loaded = asyncio.create_task(self._watch_loading())
        await asyncio.shield(self._loaded)
        return True

    async def _watch_loading(self) -> None:
        while self.is_loading:  # noqa: ASYNC110  the engine's thread tells no event loop
            await asyncio.sleep(_LOAD_POLL)

    # -- chats -------------------------------------------------------------------------------------------------
    async def new_chat(self, user: str, title: str = "") -> str:
        """Create an empty chat and return its id. The title comes from the first message unless given."""
        with _worded(""):
            return await self._store.create_chat(_user(user), title_text(title) if title else "")

    async def list_chats(self, user: str, limit: int = 200, offset: int = 0) -> list[ChatInfo]:
        """The user's chats, last updated first."""
        return [self._info(row) for row in await self._store.chats(_user(user), limit, offset)]

    async def count_chats(self, user: str) -> int:
        """How many chats the user has."""
        return await self._store.count_chats(_user(user))

    async def search(self, user: str, text: str, limit: int = 100) -> list[ChatInfo]:
        """Chats whose title or any turn contains `text`, whatever its case; a blank text lists all."""
        text = " ".join(storable(text).split())
        if not text:
            return await self.list_chats(user, limit)
        return [self._info(row) for row in await self._store.search(_user(user), text, limit)]

    async def open_chat(self, user: str, chat_id: str) -> ChatView:
        """Everything that the page shows of one chat. ChatNotFound if it is not this user's."""
        with _worded(chat_id):
            chat, turns, job, unsaved = await self._present(_user(user), chat_id)
        branch = branch_to(turns, chat.leaf)
        return ChatView(
            id=chat.id,
            title=chat.title,
            settings=self._settings(chat),
            turns=turn_views(turns, branch, job, unsaved),
            job=job,
            unsaved=unsaved,
            owner=self.owner_slot(chat_id),
            leaf=chat.leaf or 0,
            context_used=context_used(branch),
            context_limit=context_limit(self._engine.status()),
        )

    async def rename(self, user: str, chat_id: str, title: str) -> None:
        """Give a title of 1 to 200 characters; it is then kept whatever is sent."""
        with _worded(chat_id):
            await self._store.rename(_user(user), chat_id, title_text(title))

    async def delete_chat(self, user: str, chat_id: str) -> None:
        """End the chat's job and delete the chat with all its branches for good."""
        with _worded(chat_id):
            await self._store.chat(_user(user), chat_id)
            if job := await self._replies.stop(chat_id, "deleted"):
                await job.wait()
            await self._store.delete_chat(user, chat_id)
            self._replies.unsaved.drop(chat_id)

    async def export_chat(self, user: str, chat_id: str) -> dict[str, Any]:
        """The whole chat, all branches, as JSON data."""
        with _worded(chat_id):
            await self._replies.unsaved.save(chat_id)
            chat, turns, _, _ = await self._present(_user(user), chat_id)
            return to_portable(chat, turns)

    async def import_chat(self, user: str, data: Any) -> str:
        """Add what `export_chat` gave as a new chat of this user; returns its id. Bad data: ValueError."""
        title, settings, turns, leaf = from_portable(data)
        with _worded(""):
            return await self._store.import_turns(_user(user), title, settings, turns, leaf)

    async def settings(self, user: str, chat_id: str) -> ChatSettings:
        """The chat's settings: what was changed, over the defaults of the model in use."""
        with _worded(chat_id):
            return self._settings(await self._store.chat(_user(user), chat_id))

    async def change_settings(self, user: str, chat_id: str, **changes: Any) -> ChatSettings:
        """Change some settings (field names of ChatSettings) and keep them. Bad value: ValueError, nothing kept.
        A value that equals the default is not kept as a choice: it follows the model in use."""
        with _worded(chat_id):
            chat = await self._store.chat(_user(user), chat_id)
            settings = self._settings(chat).changed(changes)
            chosen = settings.difference(self.default_settings())
            if chosen != chat.settings:  # every message brings them along
                await self._store.set_settings(user, chat_id, chosen)
        return settings

    def default_settings(self) -> ChatSettings:
        """The defaults for the model in use: calmer ones for a small demo model."""
        return SMALL_MODEL_DEFAULTS if self._engine.status().small_model else DEFAULTS

    # -- turns -------------------------------------------------------------------------------------------------
    async def send(self, user: str, chat_id: str, text: str, shown_leaf: int = 0) -> Job:
        """Append a user's message to the open branch and answer it.

        shown_leaf: the last turn that the user saw, 0 where that is not known. A branch that does not go on from there
        was opened in another window since; then the message is appended to what was seen."""
        message = message_text(text)

        async def start(chat: ChatRow) -> Job:
            branch = await self._store.path(user, chat.id, chat.leaf)
            if shown_leaf and all(turn.id != shown_leaf for turn in branch):
                with suppress(NotFound):  # such as one that was taken back
                    branch = await self._store.path(user, chat.id, shown_leaf)
            return await self._answer(user, chat, [*branch, _user_turn(message, branch[-1].id if branch else None)])

        return await self._start(user, chat_id, start)

    async def edit(self, user: str, chat_id: str, turn_id: int, text: str) -> Job:
        """Put an edited copy of a user's turn beside it (a new branch) and answer that."""
        message = message_text(text)

        async def start(chat: ChatRow) -> Job:
            *branch, edited = await self._path(user, chat.id, turn_id)
            if edited.role != "user":
                raise ChatError("only your own messages can be edited; a reply can be asked for again")
            return await self._answer(user, chat, [*branch, _user_turn(message, edited.parent)])

        return await self._start(user, chat_id, start)

    async def retry(self, user: str, chat_id: str, turn_id: int) -> Job:
        """Answer again: `turn_id` is a user's turn or one of its replies. The new reply stands beside the old."""

        async def start(chat: ChatRow) -> Job:
            branch = await self._path(user, chat.id, turn_id)
            if branch[-1].role == "assistant":
                branch.pop()
            return await self._answer(user, chat, branch)

        return await self._start(user, chat_id, start)

    async def continue_reply(self, user: str, chat_id: str, turn_id: int) -> Job:
        """Go on with a reply that was stopped or cut or met a limit: the same turn grows. Refused once the chat went
        on after it, since those turns answered the reply as it was."""

        async def start(chat: ChatRow) -> Job:
            *branch, reply = await self._path(user, chat.id, turn_id)
            _, turns = await self._store.chat_and_turns(user, chat.id)
            if not can_continue(reply, turns):
                raise ChatError("this reply cannot go on: it ended by itself, or the chat has gone on after it")
            owner = self.owner_slot(chat_id)
            return await self._replies.go_on(user, chat, self._settings(chat), branch, reply, owner=owner)

        return await self._start(user, chat_id, start)

    async def open_branch(self, user: str, chat_id: str, turn_id: int) -> None:
        """Make the branch through this turn the open one, down to its newest leaf."""
        with _worded(chat_id):
            await self._store.open_branch(_user(user), chat_id, _turn_id(turn_id))

    async def stop(self, user: str, chat_id: str) -> bool:
        """Stop the chat's running job, keeping its text; False if nothing runs."""
        with _worded(chat_id):
            await self._store.chat(_user(user), chat_id)
        return await self._replies.stop(chat_id, "user") is not None

    def job(self, user: str, chat_id: str) -> Job | None:
        """The chat's running job, to watch; None if nothing runs or it is not this user's chat."""
        job = self._replies.job(chat_id)
        return job if job is not None and job.user == user else None

    def unsaved(self, user: str, chat_id: str) -> UnsavedReply | None:
        """The chat's ended reply that is not on disk yet; None if there is none or it is not this user's chat."""
        reply = self._replies.unsaved.get(chat_id)
        return reply if reply is not None and reply.user == user else None

    def owner_slot(self, chat_id: str) -> int:
        """The small integer (1 to 65,535) that the engine stamps on this chat's KV blocks."""
        return self._owners.slot(chat_id)

    async def shutdown(self) -> None:
        """End all jobs, storing what there is. No call may follow."""
        await self._replies.shutdown()

    # -- shared by the above -----------------------------------------------------------------------------------
    async def _present(self, user: str, chat_id: str) -> tuple[ChatRow, list[TurnRow], Job | None, UnsavedReply | None]:
        """A chat, its turns (an ended reply that is not on disk among them), its running job and that unsaved reply,
        as of one moment.

        Rows and job are read one after the other, so a row may say "running" when its job is only about to start, or
        has just ended: then both are read again. One that says so twice, with no job of its own at either time, has
        none: it was refused its start, and then could not be taken back."""
        seen: set[int] = set()
        while True:
            job = self._replies.job(chat_id)
            own = job.turn_id if job is not None else None
            chat, turns = await self._store.chat_and_turns(user, chat_id)
            if job is not None and job.done:
                job = None
            unsaved = self._replies.unsaved.get(chat_id)
            if unsaved is not None:
                turns = unsaved.over(turns)
            orphans = {turn.id for turn in turns if turn.status == "running" and (not job or turn.id != job.turn_id)}
            if orphans <= seen and own not in orphans:
                return chat, turns, job, unsaved
            seen = orphans - {own}
            await self._replies.started(chat_id)

    async def _start(self, user: str, chat_id: str, start: Callable[[ChatRow], Awaitable[Job]]) -> Job:
        """`start(chat)`, alone for this chat. Whose chat it is comes first: "busy" would tell that it exists."""
        with _worded(chat_id):
            await self._store.chat(_user(user), chat_id)

            async def alone() -> Job:
                # Read again: another reply may have ended meanwhile and moved the open leaf.
                return await start(await self._store.chat(user, chat_id))

            return await self._replies.start(chat_id, alone)

    async def _answer(self, user: str, chat: ChatRow, branch: list[TurnRow]) -> Job:
        owner = self.owner_slot(chat.id)
        return await self._replies.answer(user, chat, self._settings(chat), branch, owner=owner)

    def _settings(self, chat: ChatRow) -> ChatSettings:
        return self.default_settings().with_stored(chat.settings)

    def _info(self, row: ChatRow) -> ChatInfo:
        answering, owner = self._replies.job(row.id) is not None, self._owners.known(row.id)
        return ChatInfo(row.id, row.title, row.created, row.updated, answering, row.snippet, owner, row.leaf or 0)

    async def _path(self, user: str, chat_id: str, turn_id: int) -> list[TurnRow]:
        return await self._store.path(user, chat_id, _turn_id(turn_id))


@contextmanager
def _worded(chat_id: object) -> Iterator[None]:
    """Says what the store raises in the page's words."""
    if not isinstance(chat_id, str):
        raise ChatNotFound("this chat does not exist")
    try:
        yield
    except NotFound as error:
        raise ChatNotFound("this chat or message does not exist; it may have been deleted") from error
    except sqlite3.OperationalError as error:
        way_on = "; make room on the disk of the data folder, then try again" if "full" in str(error) else ""
        raise ChatError(f"the database could not be used ({error}); nothing was changed{way_on}") from error


def _user(user: object) -> str:
    if not isinstance(user, str) or not 1 <= len(user) <= MAX_USER_CHARS:
        raise ChatError(f"the user's id must be a string of 1 to {MAX_USER_CHARS} characters; reload the page")
    return storable(user)


def _turn_id(turn_id: object) -> int:
    # SQLite's integers end at 64 bits.
    if isinstance(turn_id, bool) or not isinstance(turn_id, int) or not 0 < turn_id < 2**63:
        raise ChatNotFound("this message does not exist")
    return turn_id


def _user_turn(text: str, parent: int | None) -> TurnRow:
    return TurnRow(id=0, parent=parent, role="user", text=text)
