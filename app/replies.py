"""Replies: from a branch of turns to a running job; one at a time for each chat.

The order is what makes a refusal free of traces and a crash free of losses: build the prompt and check that it fits,
write the user's turn and an empty reply, submit, and if the engine refuses, take the two turns back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from app.chat_settings import ChatSettings
from app.errors import ChatBusy, ChatError, ModelNotReady, ReplyUnsaved
from app.figures import Figures
from app.jobs import Job
from app.prompt import Prompt, build_prompt
from app.records import ChatRow, TurnRow
from app.store import Store
from app.text import title_of
from app.unsaved import Unsaved, UnsavedReply
from engine.engine_thread import EngineError

if TYPE_CHECKING:
    from engine.engine_thread import EngineThread
    from engine.status import EngineStatus
    from models.tokenizer import Tokenizer


class Replies:
    """The running jobs by chat, the ended ones that could not be saved yet (`unsaved`), and the only way to start
    one. Callers have checked whose chat it is."""

    def __init__(
        self, store: Store, engine: EngineThread, abandon_after: float | None, *, isolate_users: bool = False
    ) -> None:
        """abandon_after: seconds a job may run without a watcher, None for ever. isolate_users: every user's
        requests have a cache salt of their own."""
        self.unsaved = Unsaved(store)
        self._store = store
        self._engine = engine
        self._abandon_after = abandon_after
        self._isolate_users = isolate_users
        self._jobs: dict[str, Job] = {}
        self._starting: dict[str, asyncio.Task[Job]] = {}
        self._closing = False

    def job(self, chat_id: str) -> Job | None:
        """The chat's running job."""
        return self._jobs.get(chat_id)

    async def started(self, chat_id: str) -> None:
        """Wait until a job that is about to start has started, or was refused."""
        if starting := self._starting.get(chat_id):
            await asyncio.wait([starting])

    async def start(self, chat_id: str, starter: Callable[[], Coroutine[Any, Any, Job]]) -> Job:
        """Run `starter` as the only one for this chat; ChatBusy while another runs or answers, ReplyUnsaved while
        the last reply cannot be saved. It goes on when the caller goes away in the middle: turns that were written
        need their job."""
        if self._closing:
            raise ChatError("the server is shutting down; your message was not sent")
        if chat_id in self._jobs or chat_id in self._starting:
            raise ChatBusy("this chat is still answering: wait for it or stop it first")
        task = asyncio.create_task(self._after_saving(chat_id, starter))
        self._starting[chat_id] = task
        task.add_done_callback(lambda _: self._starting.pop(chat_id))
        return await asyncio.shield(task)

    async def _after_saving(self, chat_id: str, starter: Callable[[], Coroutine[Any, Any, Job]]) -> Job:
        if unsaved := await self.unsaved.save(chat_id):
            raise ReplyUnsaved(
                f"the last reply of this chat is not on disk yet ({unsaved.reason}): "
                "make room on the disk of the data folder, then try again"
            )
        return await starter()

    async def stop(self, chat_id: str, cut_by: str) -> Job | None:
        """Stop the chat's job, also one that is about to start, and return it; None if nothing runs."""
        await self.started(chat_id)
        job = self._jobs.get(chat_id)
        if job is not None:
            job.stop(cut_by)
        return job

    async def answer(
        self, user: str, chat: ChatRow, settings: ChatSettings, branch: Sequence[TurnRow], *, owner: int
    ) -> Job:
        """Generate a new reply to the last turn of `branch`, which is a user's; id 0 says that it is to be stored."""
        prompt, fingerprint = await self._prompt(settings, branch, None)
        question = branch[-1]
        reply = TurnRow(
            id=0,
            parent=question.id or None,
            role="assistant",
            text="",
            status="running",
            fingerprint=fingerprint,
            common=prompt.common,
            suffix=prompt.suffix,
        )
        rows = [reply] if question.id else [question, reply]
        ids = await self._store.add_turns(user, chat.id, rows, title_of(question.text) if len(branch) == 1 else "")
        reply.id = ids[-1]
        try:
            return self._launch(user, chat, reply, prompt, settings, owner, _turn_number(branch))
        except BaseException:
            await self._store.withdraw_turns(user, chat.id, ids, chat.leaf)
            raise

    async def go_on(
        self, user: str, chat: ChatRow, settings: ChatSettings, branch: Sequence[TurnRow], reply: TurnRow, *, owner: int
    ) -> Job:
        """Let `reply`, which answered `branch`, grow."""
        prompt, fingerprint = await self._prompt(settings, branch, reply)
        grown = replace(
            reply,
            status="running",
            fingerprint=fingerprint,
            common=prompt.common,
            suffix=prompt.suffix,
            reply=prompt.reply_ids,
        )
        await self._store.save_turn(user, chat.id, grown)
        try:
            return self._launch(user, chat, grown, prompt, settings, owner, _turn_number(branch))
        except BaseException:
            await self._store.save_turn(user, chat.id, reply)
            raise

    async def shutdown(self) -> None:
        """End all jobs, storing what there is, and start no other."""
        self._closing = True
        if self._starting:
            await asyncio.wait(self._starting.values())
        jobs = list(self._jobs.values())
        for job in jobs:
            job.stop("shutdown")
        await asyncio.gather(*(job.wait() for job in jobs))
        await self.unsaved.close()

    async def _prompt(
        self, settings: ChatSettings, branch: Sequence[TurnRow], unfinished: TurnRow | None
    ) -> tuple[Prompt, str]:
        tokenizer, limit = self._ready()
        # Encoding a long paste takes a while; other people's streams must not wait for it.
        prompt = await asyncio.to_thread(build_prompt, tokenizer, branch, settings, limit, unfinished)
        return prompt, tokenizer.fingerprint

    def _launch(
        self, user: str, chat: ChatRow, reply: TurnRow, prompt: Prompt, settings: ChatSettings, owner: int, turn: int
    ) -> Job:
        status = self._engine.status()
        params = settings.sampling_params(max(1, context_limit(status) - len(prompt.ids)))
        try:
            stream = self._engine.submit(
                prompt.ids, params, owner=owner, turn=turn, cache_salt=user if self._isolate_users else ""
            )
        except EngineError as error:
            raise ModelNotReady(str(error)) from error
        figures = Figures(
            prompt_tokens=len(prompt.ids),
            block_size=status.block_size,
            reused_prefix=prompt.reused_prefix,
            diverged_at=prompt.diverged_at,
            diverged_token=prompt.diverged_token,
            stored_before=prompt.stored_before,
            left_out=prompt.left_out,
            encoded_anew=prompt.encoded_anew,
            max_tokens=params.max_tokens,
            model=status.model,
        )
        job = Job(
            self._store,
            user,
            chat.id,
            reply,
            stream,
            figures,
            owner=owner,
            wanted_tokens=settings.max_tokens,
            abandon_after=self._abandon_after,
            on_end=self._ended,
        )
        self._jobs[chat.id] = job
        return job

    def _ended(self, job: Job) -> None:
        self._jobs.pop(job.chat_id, None)
        if job.unsaved:
            self.unsaved.keep(UnsavedReply(job.user, job.chat_id, job.turn, job.unsaved))

    def _ready(self) -> tuple[Tokenizer, int]:
        """The tokenizer and the context's limit in tokens. Raises ModelNotReady."""
        status, tokenizer = self._engine.status(), self._engine.tokenizer
        if not status.ready:
            if status.error:
                raise ModelNotReady(f"the model is not available: {status.error}")
            raise ModelNotReady(f"the model is still loading ({status.load.stage}): send it again when it is ready")
        if tokenizer is None:
            raise ModelNotReady(f"model {status.model} came without a tokenizer: it takes token ids, not chats")
        return tokenizer, context_limit(status)


def _turn_number(branch: Sequence[TurnRow]) -> int:
    """The turn of the conversation, from 1, that answers `branch`: one for every message of the user's."""
    return sum(turn.role == "user" for turn in branch)


def context_limit(status: EngineStatus) -> int:
    """Tokens that prompt and output may take together: the model's limit, or the pool's where that is smaller."""
    return min(status.max_model_len, status.kv["total"] * status.block_size)
