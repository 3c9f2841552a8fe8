"""Inbox: what other threads want done by the engine's, between two steps and in the order in which they asked."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Inbox:
    """Commands, and questions, which are commands whose answer somebody waits for. Every question is answered: by the
    engine's thread, or, once that takes no commands any more, by fail() to whoever is in unanswered()."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._asked: set[Future[Any]] = set()

    def post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)

    def next(self, wait: bool, timeout: float | None) -> Callable[[], None] | None:
        """The next command; None where there is none now, or within the timeout (seconds)."""
        try:
            return self._commands.get(wait, timeout)
        except queue.Empty:
            return None

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Have `question` run; what it returns or raises is the future's."""
        answer: Future[T] = Future()
        self._asked.add(answer)

        def run() -> None:
            if answer not in self._asked:
                return  # answered by the engine's end
            self._asked.discard(answer)
            try:
                answer.set_result(question())
            except Exception as error:  # it is the asker's, who gets it raised
                answer.set_exception(error)

        self.post(run)
        return answer

    def take_unanswered(self) -> set[Future[Any]]:
        """The questions that are still open; from here on they are the caller's to answer."""
        asked, self._asked = self._asked, set()
        return asked
