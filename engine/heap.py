"""What Python's garbage collector costs a process that serves: little, where it searches what is new, and seldom."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# More objects than the steps in flight have at hundreds of streams, which come and go without its help: by default it
# searches after 700 of them, at 256 streams in every step.
_MANY_NEW = 10_000


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Within, what exists already is not searched: hundreds of thousands of objects of a model and its libraries,
    for whose sake every full collection would stop all streams for a tenth of a second or more. It is the process's
    one collector: what others have made by then and let go in cycles stays until the end."""
    first, *rest = gc.get_threshold()
    gc.collect()
    gc.freeze()
    if first:  # 0: somebody has switched it off
        gc.set_threshold(max(first, _MANY_NEW), *rest)
    try:
        yield
    finally:
        gc.set_threshold(first, *rest)
        gc.unfreeze()
