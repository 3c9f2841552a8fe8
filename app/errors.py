"""ChatError and its kinds: refusals of the chat, each one line for the page."""

from __future__ import annotations


class ChatError(ValueError):
    """A refusal, with one line for the page. Nothing was written; the page keeps the draft."""


class ChatNotFound(ChatError):
    """No such chat or turn for this user."""


class ChatBusy(ChatError):
    """The chat is still answering."""


class ReplyUnsaved(ChatError):
    """The chat's last reply is not on disk yet; none begins before it is."""


class BlankMessage(ChatError):
    """Nothing but white space was sent: the page ignores it."""


class ModelNotReady(ChatError):
    """The model cannot answer now: it is loading (the text has stage and percent), failed to, died, or its queue is
    full."""


class ContextFull(ChatError):
    """The prompt does not fit. `prompt_tokens` and `max_model_len` are the two numbers. The message names
    the ways on."""

    def __init__(self, message: str, prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len
