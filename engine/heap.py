"""What Python's garbage collector costs a process that serves: little, where it searches what is new, and seldom.

It is the process's one collector: what this asks of it holds for everybody's objects.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# More objects than the steps in flight have at hundreds of streams, which come and go without its help: by default it
# searches after 700 of them, at 256 streams in every step.
_MANY_NEW = 10_000

_lock = threading.Lock()
_thresholds: list[tuple[int, int, int]] = []  # those that each of the users of rare_collections() has found
_num_frozen = 0  # users of settled_heap()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Within, the collector waits for many new objects before it searches them."""
    with _lock:
        first, second, third = gc.get_threshold()
        _thresholds.append((first, second, third))
        if first:  # 0: somebody has switched it off
            gc.set_threshold(max(first, _MANY_NEW), second, third)
    try:
        yield
    finally:
        with _lock:
            before = _thresholds.pop()
            if not _thresholds:
                gc.set_threshold(*before)


@contextmanager
def settled_heap() -> Iterator[None]:
    """Within, what exists already is not searched: hundreds of thousands of objects of a model and its libraries, for
    whose sake every full collection would stop all streams for a tenth of a second or more. For as long as a process
    serves, not for a call: of what exists, nothing that is let go in cycles is freed before the end."""
    global _num_frozen
    with _lock:
        _num_frozen += 1
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        with _lock:
            _num_frozen -= 1
            if not _num_frozen:
                gc.unfreeze()
