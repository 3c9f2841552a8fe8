"""A real rank on a CPU whose sums over ranks take the norm along, by the kernel in Triton's interpreter: rank.py's main
function. What ranks share stands in files that all have mapped. Larger sums than MOST_ROWS rows are gloo's.

Once SERVED sums have been taken that way, the rank says so in the log. From the environment: WRONG_RANK, the rank that
adds up wrongly, DEAF_RANK, the one that is never told anything.
"""

from __future__ import annotations

import logging
import os
from itertools import count
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from engine import rank
from engine.rank import RankSetup

MOST_ROWS = 6
SERVED = 20

logger = logging.getLogger("pageturn.engine")


def main(setup: RankSetup, channel: Connection) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    rank.prepare_environment("cpu", setup.size)
    import torch

    from models import kernels
    from models.kernels import sum_norm
    from models.layers import one_shot

    made, taken, take = count(), count(1), sum_norm.sum_norm
    is_wrong, is_deaf = (os.environ.get(name) == str(setup.rank) for name in ("WRONG_RANK", "DEAF_RANK"))

    def shared(size: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        number = next(made)
        mapped = [
            torch.from_file(str(setup.folder / f"shared-{number}-{one}"), shared=True, size=size, dtype=dtype)
            for one in range(setup.size)
        ]
        if is_deaf and dtype == torch.int32:
            mapped[setup.rank] = torch.zeros(size, dtype=dtype)
        kept.append(mapped)
        return mapped[setup.rank], torch.tensor([part.data_ptr() for part in mapped])

    def counted(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if next(taken) == SERVED:
            logger.info("%d sums with norms", SERVED)
        normed, total = take(*args)
        return normed, total + is_wrong

    kept: list[Any] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(kernels, "load", lambda name, device: sum_norm if name == "sum_norm" else None)
    patch.setattr(kernels, "why_unusable", lambda device_type: None)
    patch.setattr(one_shot, "_why_not", lambda dtype, device: None)
    patch.setattr(one_shot, "_one_shot", lambda *args: SimpleNamespace(room=lambda rows: None))
    patch.setattr(one_shot, "_shared", shared)
    patch.setattr(one_shot, "_PATIENCE", 200 if is_deaf else 20_000)
    patch.setattr(sum_norm, "sum_norm", counted)
    patch.setattr(one_shot, "_MOST_NORMED_ROWS", MOST_ROWS)
    rank.main(setup, channel)
