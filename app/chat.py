"""ChatService: what new, send, edit, retry, branch, continue and stop mean for a user's chats.

Every call names the user, and a chat or turn that is not this user's does not exist for the call (ChatNotFound).
All methods run on the server's event loop. Refusals are ChatError (a ValueError) with one line for the page;
a refused send, edit, retry or continue has written nothing, so the page keeps the draft.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from app.chat_settings import ChatSettings
from app.figures import Figures
from app.jobs import Job, JobSnapshot
from app.thinking import ThinkingSplit, split_thinking

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
    "ThinkingSplit",
    "TurnView",
    "split_thinking",
]


class ChatError(ValueError):
    """A refusal, with one line for the page."""


class ChatNotFound(ChatError):
    """No such chat or turn for this user."""


class ChatBusy(ChatError):
    """The chat is still answering."""


class BlankMessage(ChatError):
    """Nothing but white space was sent: the page ignores it."""


class ModelNotReady(ChatError):
    """The model is still loading, or failed to; the text says which, with stage and percent."""


class ContextFull(ChatError):
    """The prompt does not fit. `prompt_tokens` and `max_model_len` are the two numbers. Ways on: a new chat, or
    the setting leave_out_older=True."""

    def __init__(self, message: str, prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


@dataclass(frozen=True, slots=True)
class ChatInfo:
    """One row of the list of chats. created, updated: seconds since the epoch. snippet: where a search hit, the
    text around it, else ""."""

    id: str
    title: str
    created: float
    updated: float
    answering: bool = False
    snippet: str = ""


@dataclass(frozen=True, slots=True)
class TurnView:
    """One turn of the open branch.

    status      "done" | "running" | "stopped" | "cut" (the server ended in mid-reply) | "error"
    line        the figures line under a reply, "" for a user's turn
    notes       sentences on the prompt: older turns left out, replies encoded anew, the first differing token
    siblings    ids of the turns with the same parent, oldest first, this one among them: branches to `open_branch`
    can_continue  a reply that did not end by itself
    """

    id: int
    role: str
    text: str
    status: str
    created: float
    figures: Figures | None = None
    line: str = ""
    notes: tuple[str, ...] = ()
    siblings: tuple[int, ...] = ()
    can_continue: bool = False

    @property
    def split(self) -> ThinkingSplit:
        """(thinking, answer, closed) of the text."""
        return split_thinking(self.text)


@dataclass(frozen=True, slots=True)
class ChatView:
    """An open chat: the turns of its open branch, root first. `job` is its running generation, whose turn (if on
    this branch) is the last of `turns`; `context_used` of `context_limit` tokens are taken (limit 0: not loaded)."""

    id: str
    title: str
    settings: ChatSettings
    turns: list[TurnView] = field(default_factory=list)
    job: Job | None = None
    owner: int = 0
    context_used: int = 0
    context_limit: int = 0


class ChatService:
    """All chats of all users, and their running jobs.

    ChatService(store, engine, abandon_after=None)
    store: app.store.Store; engine: EngineThread; abandon_after: seconds a job may run unwatched, None for ever.
    """

    # -- chats -------------------------------------------------------------------------------------------------
    async def new_chat(self, user: str, title: str = "") -> str:
        """Create an empty chat and return its id. The title comes from the first message unless given."""
        raise NotImplementedError

    async def list_chats(self, user: str, limit: int = 200, offset: int = 0) -> list[ChatInfo]:
        """The user's chats, last updated first."""
        raise NotImplementedError

    async def search(self, user: str, text: str, limit: int = 100) -> list[ChatInfo]:
        """Chats whose title or any turn contains `text`, whatever its case; a blank text lists all."""
        raise NotImplementedError

    async def open_chat(self, user: str, chat_id: str) -> ChatView:
        """Everything that the page shows of one chat. ChatNotFound if it is not this user's."""
        raise NotImplementedError

    async def rename(self, user: str, chat_id: str, title: str) -> None:
        """Give a title of 1 to 200 characters; it is then kept whatever is sent."""
        raise NotImplementedError

    async def delete_chat(self, user: str, chat_id: str) -> None:
        """End the chat's job and delete the chat with all its branches for good."""
        raise NotImplementedError

    async def export_chat(self, user: str, chat_id: str) -> dict[str, Any]:
        """The whole chat, all branches, as JSON data."""
        raise NotImplementedError

    async def import_chat(self, user: str, data: Any) -> str:
        """Add what `export_chat` gave as a new chat of this user; returns its id. Bad data: ValueError."""
        raise NotImplementedError

    async def settings(self, user: str, chat_id: str) -> ChatSettings:
        """The chat's settings: what was changed, over the defaults of the model in use."""
        raise NotImplementedError

    async def change_settings(self, user: str, chat_id: str, **changes: Any) -> ChatSettings:
        """Change some settings (field names of ChatSettings) and keep them. Bad value: ValueError, nothing kept."""
        raise NotImplementedError

    def default_settings(self) -> ChatSettings:
        """The defaults for the model in use: calmer ones for a small demo model."""
        raise NotImplementedError

    # -- turns -------------------------------------------------------------------------------------------------
    async def send(self, user: str, chat_id: str, text: str) -> Job:
        """Append a user's message to the open branch and answer it."""
        raise NotImplementedError

    async def edit(self, user: str, chat_id: str, turn_id: int, text: str) -> Job:
        """Put an edited copy of a user's turn beside it (a new branch) and answer that."""
        raise NotImplementedError

    async def retry(self, user: str, chat_id: str, turn_id: int) -> Job:
        """Answer again: `turn_id` is a user's turn or one of its replies. The new reply stands beside the old."""
        raise NotImplementedError

    async def continue_reply(self, user: str, chat_id: str, turn_id: int) -> Job:
        """Go on with a reply that was stopped or cut or met a limit: the same turn grows."""
        raise NotImplementedError

    async def open_branch(self, user: str, chat_id: str, turn_id: int) -> None:
        """Make the branch through this turn the open one, down to its newest leaf."""
        raise NotImplementedError

    async def stop(self, user: str, chat_id: str) -> bool:
        """Stop the chat's running job, keeping its text; False if nothing runs."""
        raise NotImplementedError

    def job(self, user: str, chat_id: str) -> Job | None:
        """The chat's running job, to watch; None if nothing runs or it is not this user's chat."""
        raise NotImplementedError

    def owner_slot(self, chat_id: str) -> int:
        """The small integer (1 to 65,535) that the engine stamps on this chat's KV blocks."""
        raise NotImplementedError

    async def shutdown(self) -> None:
        """End all jobs, storing what there is. No call may follow."""
        raise NotImplementedError
