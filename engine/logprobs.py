"""Log-probabilities of chosen and of likeliest tokens: log_softmax of a model's raw logits, in float32.

log_softmax(x)[i] is x[i] - logsumexp(x), so only the wanted entries are ever written, not a second [R, V].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.outputs import TokenLogprobs

_SLICE = 2**23  # logits of a prompt taken at once: 32 MiB of float32


@dataclass(slots=True)
class ScoredRows:
    """The P rows of a batch whose log-probabilities are wanted, and of how many alternatives.

    index   their rows in the batch, as list and as int64 [P] on the device (None: all rows, in order)
    counts  alternatives of each
    """

    index: list[int]
    rows: Tensor | None
    counts: list[int]


@dataclass(slots=True)
class Scores:
    """On the device until read(): chosen float32 [P] of tokens int64 [P]; values float32 and ids int64 [P, k] of the
    k likeliest, best first, of which row i wants counts[i]."""

    tokens: Tensor
    chosen: Tensor
    values: Tensor
    ids: Tensor
    counts: list[int]

    def read(self) -> list[TokenLogprobs]:
        """The same on the host, one per row."""
        columns = (self.tokens, self.chosen, self.values, self.ids)
        return [
            TokenLogprobs(token, chosen, tuple(zip(ids[:count], values[:count], strict=True)))
            for token, chosen, values, ids, count in zip(*(c.tolist() for c in columns), self.counts, strict=True)
        ]


def score(logits: Tensor, tokens: Tensor, wanted: ScoredRows) -> Scores:
    """The scores of `wanted` for raw logits float32 [R, V] and the chosen tokens int64 [R]."""
    if wanted.rows is not None:
        logits, tokens = logits[wanted.rows], tokens[wanted.rows]
    return _score(logits, tokens, wanted.counts)


def score_prompt(
    hidden: Tensor, targets: Tensor, count: int, head: Callable[[Tensor], Tensor | None], vocab: int
) -> Scores | None:
    """Of targets int64 [P], the tokens that follow hidden states [P, H]; head makes float32 logits [., vocab] of these.

    The logits are computed a slice at a time: those of a whole chunk would take more memory than the model. None on
    a rank that has no logits, which takes part in the computation of each slice all the same.
    """
    size = max(1, _SLICE // vocab)
    parts = []
    for start in range(0, len(targets), size):
        tokens = targets[start : start + size]
        logits = head(hidden[start : start + size])
        if logits is not None:
            parts.append(_score(logits, tokens, [count] * len(tokens)))
    if not parts:
        return None
    return Scores(
        targets,
        torch.cat([p.chosen for p in parts]),
        torch.cat([p.values for p in parts]),
        torch.cat([p.ids for p in parts]),
        [count] * len(targets),
    )


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The values float32 [R, count] and ids int64 of the largest logits; of equal ones the lowest ids, which is the
    order that tokens are drawn in. (topk() leaves it open which of them it takes, and in what order.)"""
    if not count:
        return logits.topk(0, dim=1)
    logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    least = logits.topk(count, dim=1).values[:, -1:]
    above, equal = logits > least, logits == least
    taken = above | (equal & (equal.cumsum(dim=1) <= count - above.sum(dim=1, keepdim=True)))
    # The ids that are taken, ascending, without asking the device how many there are.
    backwards = torch.arange(logits.shape[1], 0, -1, device=logits.device)
    ids = logits.shape[1] - (taken * backwards).topk(count, dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _score(logits: Tensor, tokens: Tensor, counts: list[int]) -> Scores:
    total = logits.logsumexp(dim=1, keepdim=True)
    values, ids = _likeliest(logits, min(max(counts), logits.shape[1]))
    # A row without a usable token has none to look up (BAD_TOKEN); its request ends with an error anyway.
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None]) - total
    return Scores(tokens, chosen.squeeze(1), values - total, ids, counts)
