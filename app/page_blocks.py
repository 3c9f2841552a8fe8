"""PageBlocks: gr.Blocks for a port that anyone can reach. An event that the page would not send, as a program can, is
refused with one line in the log. Gradio by itself logs the traceback of such an event like a fault of the server."""

from __future__ import annotations

import logging
from typing import Any

import gradio as gr
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from gradio.route_utils import FnIndexInferError
from starlette.exceptions import HTTPException

from app.errors import ChatError
from app.page_queue import PageQueue
from engine.shown import shortened, shown

log = logging.getLogger("pageturn.page")

# Loads of the page whose state Gradio keeps, 90 KB each. One that it has forgotten goes on from a new one's.
SESSIONS_KEPT = 1_000
NO_SUCH_EVENT = "the page has no such event"


class PageBlocks(gr.Blocks):
    """Its listeners take arguments as they come (`preprocess=False`), and check them (app/page_arguments.py)."""

    def queue(self, *_: Any, **__: Any) -> PageBlocks:
        """Called by gr.Blocks while it is made, whose own makes an application besides, which takes 0.1 s and which
        mounting the page replaces."""
        self._queue = PageQueue(self)
        self.api_open = False
        return self

    def close_events(self) -> None:
        """Call it once all listeners are there."""
        # Gradio checks the paths of files only where it has launched the page itself; here none is to be read at all.
        self.has_launched = True
        self.state_session_capacity = SESSIONS_KEPT
        self.default_config.fns = _Listeners(self.default_config.fns)

    def validate_inputs(self, block_fn: Any, inputs: list[Any]) -> None:
        """Called before anything is done with an event's values. Where one looks like a file, Gradio would make a copy
        for everybody to fetch, of whatever this process can read."""
        if len(inputs) < len(block_fn.inputs):
            raise gr.Error(f"the event brings {len(inputs)} of {len(block_fn.inputs)} values: reload the page")
        for value in inputs:
            if not isinstance(value, str | int | float | None):
                raise gr.Error(f"{shown(value)} is neither text nor a number")

    async def process_api(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Gradio prints the traceback of what this raises, of a gr.Error only where that says so. Other exceptions
        are faults of the server, and stay."""
        try:
            return await super().process_api(*args, **kwargs)
        except ChatError as error:  # an ordinary refusal, where the handler has no better place for it
            raise gr.Error(str(error), print_exception=False) from error
        except gr.Error as error:
            log.warning("an event was refused: %s", shortened(" ".join(str(error.message).split())))
            error.print_exception = False
            raise


class _Listeners(dict[int, Any]):
    """The listeners by their index, which an event names."""

    def __missing__(self, index: object) -> Any:
        raise HTTPException(404, NO_SUCH_EVENT)


def refuse_in_words(gradio_app: FastAPI) -> None:
    """Make Gradio's application refuse a body that is no event, without its own words for that: a traceback where it
    names no listener, else the whole body once more."""

    @gradio_app.exception_handler(FnIndexInferError)
    async def no_listener(*_: Any) -> JSONResponse:
        return JSONResponse({"detail": NO_SUCH_EVENT}, 404)

    @gradio_app.exception_handler(RequestValidationError)
    async def no_event(_: Any, error: RequestValidationError) -> JSONResponse:
        found = [{name: one[name] for name in ("type", "loc", "msg")} for one in error.errors()[:1]]
        return JSONResponse({"detail": found}, 422)
