"""transformers as the reference of what a model's next tokens are."""

from __future__ import annotations

from typing import Any

import torch


def assert_greedy(model: Any, prompts: list[list[int]], continuations: list[list[int]]) -> None:
    """Each continuation is the model's own greedy one: at every position, given the tokens before it, the next
    token is the argmax. A forward shows for all positions what a decoding loop would show step by step; what pads
    the shorter rows stands after their tokens, where causal attention does not look."""
    rows = [prompt + continuation for prompt, continuation in zip(prompts, continuations, strict=True)]
    for first in range(0, len(rows), 8):
        group = rows[first : first + 8]
        width = max(map(len, group))
        with torch.inference_mode():
            best = model(torch.tensor([row + [0] * (width - len(row)) for row in group])).logits.argmax(-1)
        for i, row in enumerate(group, start=first):
            assert best[i - first, len(prompts[i]) - 1 : len(row) - 1].tolist() == continuations[i]
