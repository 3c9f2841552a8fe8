"""A real rank that says in the log what Python's garbage collector spares once it serves: rank.py's main function."""

from __future__ import annotations

import gc
import logging
from multiprocessing.connection import Connection

import pytest

from engine import rank
from engine.rank import RankSetup


def main(setup: RankSetup, channel: Connection) -> None:
    serve = rank.RankLoop.serve

    def told(self: rank.RankLoop) -> None:
        logging.getLogger("pageturn.engine").info("%d frozen, every %d", gc.get_freeze_count(), gc.get_threshold()[0])
        serve(self)

    pytest.MonkeyPatch().setattr(rank.RankLoop, "serve", told)
    rank.main(setup, channel)
