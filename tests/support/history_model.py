"""A stand-in for the model whose next token depends on every token it can see through the block table.

It keeps, in place of keys and values, the token and position written to each slot, and reads the whole history
back through the block tables. One wrong slot, stale block or missed write changes its output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig
from engine.device import DevicePlan
from engine.llm_engine import LLMEngine
from engine.loading import EngineParts
from engine.model_runner import StepHandle
from engine.outputs import TokenLogprobs
from engine.sampling_params import BeamSearchParams
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from models.config import ModelConfig

VOCAB = 97
EOS = 96


def next_token(history: list[int]) -> int:
    """The token after `history`: a pure function of all of it, rarely EOS."""
    digest = hashlib.blake2b(bytes(history), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB


def fork_token(history: list[int], index: int) -> int:
    """The token after `history` in the continuation number `index`, which tells continuations apart."""
    return next_token(history) if index == 0 else next_token([*history, index])


def likeliest(history: list[int], count: int) -> TokenLogprobs:
    """The `count` likeliest tokens after `history`, all different, with log-probabilities that depend on all of it."""
    digest = hashlib.blake2b(bytes(history)).digest()
    ranked = sorted(range(VOCAB), key=lambda token: (digest[token % 64] * 131 + token * 29) % 509)[: max(1, count)]
    top = tuple((token, -0.05 * (rank + 1) - digest[rank] / 997) for rank, token in enumerate(ranked))
    best_first = tuple(sorted(top, key=lambda entry: -entry[1]))
    return TokenLogprobs(*best_first[0], best_first[:count])


def prompt_entries(prompt: list[int], positions: range, count: int) -> list[TokenLogprobs]:
    """The entries of prompt_logprobs for the tokens behind these positions."""
    return [likeliest(prompt[: i + 1], count)._replace(token_id=prompt[i + 1]) for i in positions]


def allowed_token(token: int, stop_ids: Collection[int], num_output: int, min_tokens: int) -> int:
    """`token`, or while min_tokens forbids it to end the request the next one that does not."""
    while num_output < min_tokens and token in stop_ids:
        token = (token + 1) % VOCAB
    return token


def expected_output(
    prompt: list[int],
    max_tokens: int,
    max_model_len: int,
    index: int = 0,
    stop_ids: Collection[int] = (EOS,),
    min_tokens: int = 0,
) -> list[int]:
    """What an engine with room enough must produce, the token that stops it left out."""
    history, output = list(prompt), []
    for count in range(min(max_tokens, max_model_len - len(prompt))):
        token = allowed_token(fork_token(history, index), stop_ids, count, min_tokens)
        if token in stop_ids:
            break
        output.append(token)
        history.append(token)
    return output


def expected_beams(prompt: list[int], params: BeamSearchParams, max_model_len: int) -> list[tuple[list[int], float]]:
    """Beam search with early_stopping over whole histories: nothing is shared, so nothing can be shared wrongly."""
    width, length_limit = params.beam_width, min(params.max_tokens, max_model_len - len(prompt))
    live: list[tuple[list[int], Any]] = [([], np.float32(0))]
    done: list[tuple[list[int], float]] = []
    for length in range(1, length_limit + 1):
        ways = [
            ([*ids, token], np.float32(logprob) + total)
            for ids, total in live
            for token, logprob in likeliest(prompt + ids, 2 * width).top
        ]
        ways = sorted(ways, key=lambda way: -way[1])[: 2 * width]
        ended = [ids[-1] == EOS or length == length_limit for ids, _ in ways]
        for (ids, total), end in list(zip(ways, ended, strict=True))[:width]:
            if end:
                done.append((ids if ids[-1] != EOS else ids[:-1], float(total / np.float32(length))))
        done = sorted(done, key=lambda beam: -beam[1])[:width]
        live = [way for way, end in zip(ways, ended, strict=True) if not end][:width]
        if not live or len(done) == width:
            break
    return done


class HistoryRunner:
    """Runs plans against a pool of slots; implements what LLMEngine asks of a runner.

    leads: a launch may follow the last one, uncollected, and then finds the tokens that are not known by itself.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.leads = False
        self._drawn: dict[int, tuple[int, int]] = {}  # by sequence: position and token, of the last launch
        self.slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)

    def can_follow(self, plan: StepPlan) -> bool:
        """As graphs do, it draws one token for each sequence, and reports nothing else of it."""
        for item in plan.items:
            seq, end = item.seq, item.start + item.num_tokens
            if seq.is_scored or (item.samples and len(seq.drawn) > 1):
                return False
            if end > len(seq.token_ids) and self._drawn.get(seq.seq_id, (-1, 0))[0] != end - 1:
                return False
        return True

    def launch(self, plan: StepPlan) -> StepHandle:
        assert all(item.num_tokens >= 1 for item in plan.items), "a sequence was planned with nothing to compute"
        writes: dict[int, tuple[int, int]] = {}
        for item in plan.items:
            for position in range(item.start, item.start + item.num_tokens):
                slot = self._slot(item.seq.block_table, position)
                entry = (self._token(item.seq, position), position)
                assert writes.get(slot, entry) == entry, f"two tokens of one step go to slot {slot}"
                writes[slot] = entry
        for slot, entry in writes.items():
            self.slots[slot] = entry
        tokens, sequences, logprobs, prompt_logprobs, drawn = [], [], {}, [], {}
        for item in plan.items:
            history = []
            for position in range(item.start + item.num_tokens):
                entry = self.slots[self._slot(item.seq.block_table, position)]
                assert entry is not None, f"{item.seq} reads position {position}, which nobody wrote"
                assert entry[1] == position, f"{item.seq} reads position {position} and finds {entry[1]}"
                history.append(entry[0])
            if wanted := item.seq.unscored_prompt(item.start, item.start + item.num_tokens):
                count = item.seq.params.prompt_logprobs or 0
                prompt_logprobs.append((item.seq, prompt_entries(item.seq.token_ids, wanted, count)))
            if not item.samples:
                continue
            for seq in item.seq.drawn:
                sequences.append(seq)
                token = fork_token(history, seq.index)
                num_output = len(history) - seq.num_prompt_tokens
                tokens.append(allowed_token(token, seq.stop_ids, num_output, seq.params.min_tokens))
                drawn[seq.seq_id] = (len(history), tokens[-1])
                if seq.num_logprobs is not None:
                    logprobs[seq] = likeliest(history, seq.num_logprobs)
        self._drawn = drawn
        token_ids = torch.tensor(tokens, dtype=torch.int64)
        return StepHandle(sequences, token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def collect(self, handle: StepHandle) -> list[int]:
        assert handle.token_ids is not None
        return handle.token_ids.tolist()

    def check_device(self) -> None:
        pass

    def release_buffers(self) -> None:
        pass

    def scrub(self, blocks: list[int]) -> None:
        for block in blocks:
            first = block * self.block_size
            self.slots[first : first + self.block_size] = [None] * self.block_size

    def copy_blocks(self, copies: dict[int, int]) -> None:
        size, before = self.block_size, self.slots.copy()
        for target, source in copies.items():
            self.slots[target * size : (target + 1) * size] = before[source * size : (source + 1) * size]

    def forget(self, seq_id: int) -> None:
        pass

    def exit(self) -> None:
        pass

    def _token(self, seq: Sequence, position: int) -> int:
        if position < len(seq.token_ids):
            return seq.token_ids[position]
        where, token = self._drawn[seq.seq_id]
        assert where == position, f"{seq} is to read its token {position}, and the last launch drew its token {where}"
        return token

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size


def history_engine(
    num_blocks: int,
    block_size: int,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 64,
    enable_prefix_caching: bool = True,
) -> LLMEngine:
    """A real LLMEngine over the stand-in model."""
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
    model_config = ModelConfig("Stand-in", VOCAB, 1, 1, 1, 1, 1, 1, max_model_len, eos_token_ids=(EOS,))
    parts = EngineParts(
        model_name="stand-in",
        model_config=model_config,
        tokenizer=None,
        device=DevicePlan(torch.device("cpu"), torch.float32, "none", block_size, ()),
        runner=HistoryRunner(num_blocks, block_size),
        num_blocks=num_blocks,
        num_parameters=0,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return LLMEngine(config, parts=parts)
