"""RowSettings: what the draw of every row needs to know, in device arrays that kernels look a row up in.

A row is packed into eight words of 64 bits, read as int64, float64, float32 or int32 by where a field stands. So one
small copy introduces a row, and a captured step finds all of it through the row's index alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

WORDS = 8
MAX_BIASES = 64  # entries of a row; each costs every logit of the row a comparison
MAX_COUNT = 0x7FFF  # of one token in an output
IN_PROMPT = 0x8000
# Places of the fields in units of their own size, of a row that begins at 0.
STREAM, TOP_P = 0, 1  # int64, float64
TEMPERATURE, MIN_P, REPETITION, PRESENCE, FREQUENCY = 4, 5, 8, 9, 10  # float32
TOP_K, NUM_BIASES, PENALIZED, PROMPT_TOKENS, TRUNCATED = 6, 7, 11, 12, 13  # int32
_ROW = struct.Struct("=Qd2f2i3f3i8x")  # in the order of the places; numpy would take each field by itself


@dataclass(slots=True)
class RowSettings:
    """Settings of N rows.

    words        int64 [N, 8], see pack(); a row of zeros is greedy
    bias_ids, bias_values, bias_until  int32, float32, int32 [N, MAX_BIASES]: entry e of a row adds its value to the
                 logit of its token while the position drawn is below `until`
    counts       int16 [N, V], bits: the highest is set for tokens of the prompt, the others count those of the output

    All but words is None where no row is penalized or biased.
    """

    words: Tensor
    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None
    bias_until: Tensor | None = None
    counts: Tensor | None = None

    @classmethod
    def zeros(cls, num_rows: int, vocab_size: int, device: torch.device) -> RowSettings:
        """Rows that are all greedy, with room for penalties and biases: 2 bytes a row and token."""
        entries = (num_rows, MAX_BIASES)
        return cls(
            torch.zeros(num_rows, WORDS, dtype=torch.int64, device=device),
            torch.zeros(entries, dtype=torch.int32, device=device),
            torch.zeros(entries, dtype=torch.float32, device=device),
            torch.zeros(entries, dtype=torch.int32, device=device),
            torch.zeros(num_rows, vocab_size, dtype=torch.int16, device=device),
        )

    def field(self, place: int, dtype: torch.dtype) -> Tensor:
        """[N], one field of every row."""
        return self.words.view(dtype)[:, place]


def pack(
    row: np.ndarray,
    *,
    stream: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    num_biases: int = 0,
    penalized: bool = False,
    num_prompt_tokens: int = 0,
) -> None:
    """Fill int64 [8]. stream: mix64(seed). temperature 0 is greedy, whatever else is set. top_k 0, top_p 1 and min_p 0
    keep all; a top_k of the vocabulary or more must be given as 0."""
    truncated = temperature > 0 and (top_k > 0 or top_p < 1.0 or min_p > 0.0)
    _ROW.pack_into(
        row.data, 0, stream, top_p, temperature, min_p, top_k, num_biases,
        repetition, presence, frequency, penalized, num_prompt_tokens, truncated,
    )  # fmt: skip


def count_tokens(prompt_ids: list[int], output_ids: list[int], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """What is not zero in a row of RowSettings.counts: its ids, int64 [K], and values, int16 [K]."""
    counts = np.bincount(np.array(output_ids, np.int64), minlength=vocab_size).astype(np.uint16)
    counts[np.array(prompt_ids, np.int64)] |= IN_PROMPT
    ids = counts.nonzero()[0]
    return ids, counts[ids].view(np.int16)
