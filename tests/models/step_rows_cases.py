"""What a captured step does first, against its reference. Collected as kernel_cases.py is."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from models.kernels.step_rows import reference, step_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("sequences", "width", "block_size"), [(1, 1, 16), (5, 40, 4), (9, 700, 16)])
def test_tables_and_ids_of_a_step(sequences: int, width: int, block_size: int) -> None:
    """Padding, tables longer than a program's strip, ids that are known, unknown and bad (-1)."""
    draw = random.Random(width)
    rows = draw.sample(range(sequences + 3), sequences)
    contexts = [draw.choice([0, 1, block_size, draw.randint(1, width * block_size)]) for _ in rows]
    contexts[0] = width * block_size
    tables = torch.randint(0, 99, (sequences + 3, width), dtype=torch.int32)
    arguments = {
        "table_rows": torch.tensor(rows),
        "blocks": torch.tensor([100 + i for i in range(sequences)], dtype=torch.int32),
        "context_lens": torch.tensor(contexts, dtype=torch.int32),
        "sources": torch.tensor([draw.choice([-1, 0, 3]) for _ in rows], dtype=torch.int32),
        "drawn": torch.tensor([7, 8, 9, -1]),
    }
    results = []
    for function, device in ((reference, torch.device("cpu")), (step_rows, DEVICE)):
        own = tables.clone().to(device)
        ids = torch.arange(50, 50 + sequences + 2).to(device)
        found = torch.zeros(sequences, width, dtype=torch.int32, device=device)
        on_device = {name: value.to(device) for name, value in arguments.items()}
        function(own, **on_device, block_size=block_size, input_ids=ids, step_tables=found)
        results.append([t.cpu().tolist() for t in (own, ids, found)])
    assert results[0] == results[1]
    assert -1 not in results[0][1]
