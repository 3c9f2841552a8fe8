"""What is added to a row's logits before anything else: logit_bias, and -inf on ids that may not be chosen yet.

As transformers' processors stand (sequence bias, then penalties, ..., then temperature), so that a bias is in units of
the model's own logits. Each request's ids and values go to the device once; a batch's are those of its requests
joined, and are kept while the batch stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class BiasRows(NamedTuple):
    """Entry e adds values[e] to the logit (rows[e], ids[e]): int64, int64 and float32, all [E]."""

    rows: Tensor
    ids: Tensor
    values: Tensor


class BiasRequest(NamedTuple):
    """What one row of a batch asks for; request_id keys what is kept on the device."""

    row: int
    request_id: int
    bias: Mapping[int, float] | None
    banned: Collection[int]


class LogitBias:
    """Biases of the live requests, on the sampler's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._banned: dict[int, tuple[Tensor, Tensor]] = {}

    def rows(self, requests: Sequence[BiasRequest]) -> BiasRows | None:
        """The batch's entries; None where nothing is asked for."""
        entries: list[tuple[int, tuple[Tensor, Tensor]]] = []
        for row, request_id, bias, banned in requests:
            if bias:
                if request_id not in self._bias:
                    self._bias[request_id] = self._to_device(list(bias), list(bias.values()))
                entries.append((row, self._bias[request_id]))
            if banned:
                if request_id not in self._banned:
                    self._banned[request_id] = self._to_device(list(banned), [-math.inf] * len(banned))
                entries.append((row, self._banned[request_id]))
        if not entries:
            return None
        counts = torch.tensor([len(ids) for _, (ids, _) in entries], device=self._device)
        rows = torch.tensor([row for row, _ in entries], device=self._device).repeat_interleave(counts)
        return BiasRows(
            rows, torch.cat([ids for _, (ids, _) in entries]), torch.cat([values for _, (_, values) in entries])
        )

    def apply(self, logits: Tensor, rows: BiasRows) -> Tensor:
        """A copy of logits float32 [R, V] with the entries added. An id both biased and banned is banned."""
        return logits.index_put((rows.rows, rows.ids), rows.values, accumulate=True)

    def forget(self, request_id: int) -> None:
        """Drop a request's tensors; an unknown id is a no-op."""
        self._bias.pop(request_id, None)
        self._banned.pop(request_id, None)

    def _to_device(self, ids: list[int], values: list[float]) -> tuple[Tensor, Tensor]:
        return (
            torch.tensor(ids, dtype=torch.int64, device=self._device),
            torch.tensor(values, dtype=torch.float32, device=self._device),
        )
