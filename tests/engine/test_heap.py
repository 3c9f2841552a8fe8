"""What is asked of the garbage collector is taken back by the last who asked for it."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import settled_rank
from engine import LLM, heap, rank_group


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines that other tests have left running do not count."""
    monkeypatch.setattr(heap, "_thresholds", [])
    monkeypatch.setattr(heap, "_num_frozen", 0)
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*thresholds)


def is_searched(one: object) -> bool:
    return any(found is one for found in gc.get_objects())


def test_what_exists_is_not_searched_until_the_last_has_left_and_what_is_new_is() -> None:
    old: list[object] = [[]]
    first, second = heap.settled_heap(), heap.settled_heap()
    first.__enter__()
    new: list[object] = [[]]
    assert not is_searched(old) and is_searched(new)
    second.__enter__()
    assert not is_searched(new)
    first.__exit__(None, None, None)
    assert not is_searched(old)
    second.__exit__(None, None, None)
    assert is_searched(old) and is_searched(new)


def test_what_was_let_go_before_is_freed_first() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    Cycle()
    with heap.settled_heap():
        assert not any(type(found) is Cycle for found in gc.get_objects())
    assert not any(type(found) is Cycle for found in gc.get_objects())


def test_collections_are_rare_until_the_last_has_left() -> None:
    first, second = heap.rare_collections(), heap.rare_collections()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold() == (heap._MANY_NEW, 10, 10)
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (heap._MANY_NEW, 10, 10)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("first", [0, 50_000])
def test_a_collector_that_is_off_or_rarer_stays_so(first: int) -> None:
    gc.set_threshold(first, 10, 10)
    with heap.rare_collections():
        assert gc.get_threshold() == (first, 10, 10)
    assert gc.get_threshold() == (first, 10, 10)


def test_a_rank_is_spared_while_it_serves(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_group, "main", settled_rank.main)
    with caplog.at_level(logging.INFO, "pageturn.engine"):
        llm = LLM(tiny_llama, device="cpu", num_kvcache_blocks=20, tensor_parallel_size=2)
        llm.generate([[1, 2]], use_tqdm=False)
        llm.exit()
    told = re.search(r"(\d+) frozen, every (\d+)", caplog.text)
    assert told is not None
    assert int(told[1]) > 50_000 and int(told[2]) == heap._MANY_NEW
