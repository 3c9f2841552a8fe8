"""What is checked of a request before it is queued."""

from __future__ import annotations

from engine.outputs import RequestPriority
from engine.sampling_params import BeamSearchParams, SamplingParams
from models.config import ModelConfig


def check_request(
    prompt_ids: list[int],
    params: SamplingParams | BeamSearchParams,
    priority: int,
    max_num_seqs: int,
    model: ModelConfig,
    has_tokenizer: bool,
) -> None:
    """Raise ValueError for an empty prompt, an id outside the vocabulary, text stops without a tokenizer, more beams
    than run at once, or a priority that is none."""
    if isinstance(priority, bool) or not isinstance(priority, int) or priority not in tuple(RequestPriority):
        names = ", ".join(f"{p.value} ({p.name})" for p in RequestPriority)
        raise ValueError(f"priority={priority!r} must be one of {names}")
    if not isinstance(params, (SamplingParams, BeamSearchParams)):
        raise ValueError(f"sampling_params={params!r} must be a SamplingParams or BeamSearchParams")
    if not prompt_ids:
        raise ValueError("prompt has 0 tokens; at least 1 is needed")
    size = model.vocab_size
    # A set of types is a tenth of the time of a look at each of a long prompt's ids.
    if set(map(type, prompt_ids)) != {int} and (odd := [i for i in prompt_ids if not _is_id(i)]):
        wrong = odd[0]
        raise ValueError(f"prompt holds {wrong!r}; token ids must be integers from 0 to {size - 1}")
    if min(prompt_ids) < 0 or max(prompt_ids) >= size:
        wrong = next(i for i in prompt_ids if not 0 <= i < size)
        raise ValueError(f"prompt holds token id {wrong}; ids of this model go from 0 to {size - 1}")
    if isinstance(params, BeamSearchParams):
        _check_beams(params.beam_width, max_num_seqs, model)
        return
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
        for token in ids:
            if token >= size:
                raise ValueError(f"{name} holds {token}; ids of this model go from 0 to {size - 1}")
    if params.min_tokens and len({*params.stop_token_ids, *model.eos_token_ids}) >= size:
        raise ValueError(
            f"min_tokens={params.min_tokens} forbids the tokens that stop, which are all {size} of this model"
        )
    if params.stop and not has_tokenizer:
        raise ValueError("stop strings need a tokenizer, and this model's folder has none; use stop_token_ids")


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
