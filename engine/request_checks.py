"""What is checked of a request before it is queued."""

from __future__ import annotations

import struct

import numpy as np

from engine.block_manager import BlockManager
from engine.outputs import RequestPriority
from engine.sampling_params import BeamSearchParams, SamplingParams
from engine.sequence import as_array
from engine.shown import shown
from models.config import ModelConfig


def check_request(
    prompt_ids: list[int],
    params: SamplingParams | BeamSearchParams,
    priority: int,
    max_num_seqs: int,
    model: ModelConfig,
    has_tokenizer: bool,
) -> np.ndarray:
    """The prompt's ids as int32 [T]. ValueError for an empty prompt, an id outside the vocabulary, text stops without a
    tokenizer, more beams than run at once, or a priority that is none."""
    if isinstance(priority, bool) or not isinstance(priority, int) or priority not in tuple(RequestPriority):
        names = ", ".join(f"{p.value} ({p.name})" for p in RequestPriority)
        raise ValueError(f"priority={shown(priority)} must be one of {names}")
    if not isinstance(params, (SamplingParams, BeamSearchParams)):
        raise ValueError(f"sampling_params={shown(params)} must be a SamplingParams or BeamSearchParams")
    size = model.vocab_size
    prompt = _checked_ids(prompt_ids, size)
    if isinstance(params, BeamSearchParams):
        _check_beams(params.beam_width, max_num_seqs, model)
        return prompt
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
        for token in ids:
            if token >= size:
                raise ValueError(f"{name} holds {shown(token)}; ids of this model go from 0 to {size - 1}")
    if params.min_tokens and len({*params.stop_token_ids, *model.eos_token_ids}) >= size:
        raise ValueError(
            f"min_tokens={params.min_tokens} forbids the tokens that stop, which are all {size} of this model"
        )
    if params.stop and not has_tokenizer:
        raise ValueError("stop strings need a tokenizer, and this model's folder has none; use stop_token_ids")
    return prompt


def why_unservable(num_prompt_tokens: int, max_model_len: int, blocks: BlockManager) -> str | None:
    """Why a prompt of so many tokens could never be served; None where it can."""
    if num_prompt_tokens >= max_model_len:
        return (
            f"the prompt has {num_prompt_tokens} tokens; with at least one token of output the limit is "
            f"{max_model_len - 1} (max_model_len {max_model_len})"
        )
    if blocks.blocks_for(num_prompt_tokens) > blocks.num_blocks:
        room = blocks.num_blocks * blocks.block_size
        return (
            f"the prompt has {num_prompt_tokens} tokens; the KV cache holds {room} "
            f"({blocks.num_blocks} blocks of {blocks.block_size})"
        )
    return None


def _checked_ids(prompt_ids: list[int], size: int) -> np.ndarray:
    if not prompt_ids:
        raise ValueError("prompt has 0 tokens; at least 1 is needed")
    # Counting types is a tenth of the time of a look at each of a long prompt's ids.
    if list(map(type, prompt_ids)).count(int) < len(prompt_ids) and (odd := [i for i in prompt_ids if not _is_id(i)]):
        raise ValueError(f"prompt holds {shown(odd[0])}; token ids must be integers from 0 to {size - 1}")
    try:
        ids = as_array(prompt_ids)
    except struct.error:
        ids = None
    if ids is None or ids.min() < 0 or ids.max() >= size:
        wrong = next(i for i in prompt_ids if not 0 <= i < size)
        raise ValueError(f"prompt holds token id {shown(wrong)}; ids of this model go from 0 to {size - 1}")
    return ids


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_beams(beam_width: int, max_num_seqs: int, model: ModelConfig) -> None:
    if beam_width > max_num_seqs:
        raise ValueError(
            f"beam_width={beam_width} is above max_num_seqs={max_num_seqs}, and the "
            "beams of a search run together; ask for fewer, or start the engine with more"
        )
    if max(2, 1 + len(model.eos_token_ids)) * beam_width > model.vocab_size:
        raise ValueError(f"beam_width={beam_width} is too many for a vocabulary of {model.vocab_size} tokens")
