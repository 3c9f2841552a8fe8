"""GraphSampling: what the draw inside a captured step knows of the sequences, in device arrays of a row each.

A sequence's settings are sent once, when its row is introduced. Its counts of tokens, which penalties need, are sent
once as well and then kept on the device: each step adds the token that it was given as input. So a step may be launched
before the host knows what the step before it drew.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.noise import mix64
from engine.sampler import draw_settings
from engine.scheduler import ScheduledSequence
from engine.sequence import Sequence
from models.kernels.row_settings import MAX_BIASES, MAX_COUNT, WORDS, RowSettings, count_tokens, pack

_ALWAYS = np.iinfo(np.int32).max
_NEVER = np.iinfo(np.int64).max


class GraphSampling:
    """Rows 0 .. num_rows - 1 are those of BlockTables; one more, which stays greedy, is the padding's.

    settings: on the device, to be read by the rows' indices. words: int64 [num_rows, WORDS], what settings.words is to
    hold, on the host.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.settings = RowSettings.zeros(num_rows + 1, vocab_size, device)
        self.words = np.zeros((num_rows, WORDS), np.int64)
        self._vocab_size, self._device = vocab_size, device
        self._drawn_from = np.zeros(num_rows, np.int64)  # the position from which on the captured draw does
        self._is_penalized = np.zeros(num_rows, np.bool_)
        self._next_position = np.zeros(num_rows, np.int64)  # that the counts of a penalized row are right for

    def introduce(self, index: int, seq: Sequence) -> None:
        """From here on the row is this sequence's; its words are still to be sent."""
        params, settings, biases = seq.params, self.settings, _biases(seq)
        self._drawn_from[index] = _drawn_from(seq)
        self._is_penalized[index] = params.has_penalties
        self._next_position[index] = -1
        if biases:
            assert settings.bias_ids is not None and settings.bias_values is not None
            assert settings.bias_until is not None
            ids, values, until = zip(*biases, strict=True)
            _send(settings.bias_ids[index, : len(ids)], np.array(ids, np.int32))
            _send(settings.bias_values[index, : len(ids)], np.array(values, np.float32))
            _send(settings.bias_until[index, : len(ids)], np.array(until, np.int32))
        pack(
            self.words[index],
            stream=mix64(seq.seed),
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            num_biases=len(biases),
            penalized=params.has_penalties,
            num_prompt_tokens=seq.num_prompt_tokens,
            **draw_settings(params, self._vocab_size),
        )

    def prepare(self, items: list[ScheduledSequence], index: np.ndarray, positions: np.ndarray) -> bool:
        """Before the step that draws the tokens at int64 positions [B] for the sequences in rows int64 [B]: bring the
        counts up to date where the last step was not one of these. Of a row's tokens those before the step's last
        input must be known. Returns whether the captured draw is all that the rows need."""
        behind = self._is_penalized[index] & (self._next_position[index] != positions)
        for i in behind.nonzero()[0].tolist():
            self._send_counts(int(index[i]), items[i].seq, int(positions[i]) - 1)
        self._next_position[index] = positions + 1
        return bool((self._drawn_from[index] <= positions).all())

    def _send_counts(self, index: int, seq: Sequence, num_tokens: int) -> None:
        """Count the first num_tokens tokens of the sequence, of which the prompt is always known. Only what is not zero
        is sent: a copy of a whole row would wait for the step in flight."""
        assert self.settings.counts is not None and len(seq.token_ids) >= num_tokens
        prompt, output = seq.token_ids[: seq.num_prompt_tokens], seq.token_ids[seq.num_prompt_tokens : num_tokens]
        ids, values = (torch.from_numpy(a).to(self._device) for a in count_tokens(prompt, output, self._vocab_size))
        self.settings.counts[index].zero_().index_copy_(0, ids, values)


def draws(seq: Sequence, position: int) -> bool:
    """Whether the captured draw is all that the sequence needs for its token at this position."""
    return _drawn_from(seq) <= position


def _drawn_from(seq: Sequence) -> int:
    """The position from which on the captured draw is all that the sequence needs; it stays the same."""
    if seq.drawn_from is None:
        seq.drawn_from = _find_drawn_from(seq)
    return seq.drawn_from


def _biases(seq: Sequence) -> list[tuple[int, float, int]]:
    """(token, what is added to its logit, while positions are below this), as many as a row holds."""
    drawn_from, biases = _drawn_from(seq), []
    if drawn_from < _NEVER:
        biases = [(token, value, _ALWAYS) for token, value in (seq.params.logit_bias or {}).items()]
    if seq.params.min_tokens and not drawn_from:
        biases += [(token, -np.inf, seq.num_prompt_tokens + _min_tokens(seq)) for token in seq.stop_ids]
    return biases


def _find_drawn_from(seq: Sequence) -> int:
    params = seq.params
    num_biases, num_banned = len(params.logit_bias or ()), len(seq.stop_ids) if params.min_tokens else 0
    too_long = params.has_penalties and seq.max_tokens > MAX_COUNT
    if seq.num_logprobs is not None or too_long or num_biases > MAX_BIASES:
        return _NEVER
    return 0 if num_biases + num_banned <= MAX_BIASES else seq.num_prompt_tokens + _min_tokens(seq)


def _min_tokens(seq: Sequence) -> int:
    """Which may be any number; the sequence ends in its context all the same."""
    return min(seq.params.min_tokens, seq.max_tokens)


def _send(target: Tensor, values: np.ndarray) -> None:
    """Not from pinned memory: the copy has left the host's when the call returns."""
    target.copy_(torch.from_numpy(values), non_blocking=True)
