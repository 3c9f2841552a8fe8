"""Requests of every kind that come and go at random, for engines that are to answer them alike."""

from __future__ import annotations

import random
from typing import Any

from engine import LLM, SamplingParams

_KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.3, "seed": 2**62 + 1},
    {"temperature": 0.7, "seed": 6, "min_tokens": 6, "stop_token_ids": list(range(0, 512, 3))},
    {"temperature": 0.8, "seed": 7, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "seed": 8, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {7: 40.0, 9: 39.0}},
    {"temperature": 0.9, "seed": 9, "logprobs": 2},
    {"temperature": 1.0, "seed": 10, "n": 3},
]
_COUNT = 14


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    """Of 1 to 29 tokens of a vocabulary of 512."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 512) for _ in range(rng.randrange(1, 30))] for _ in range(count)]


def serve(llm: LLM, seed: int) -> dict[tuple[int, int], tuple[list[int], list[Any]]]:
    """Requests of all kinds that come at random steps, some of them aborted; tokens and log-probabilities of each."""
    rng = random.Random(seed)
    kinds = [rng.choice(_KINDS) for _ in range(_COUNT)]
    asked = [SamplingParams(max_tokens=rng.randrange(6, 20), ignore_eos=True, **kind) for kind in kinds]
    arrivals = sorted(rng.randrange(40) for _ in asked)
    aborts = {rng.randrange(_COUNT): rng.randrange(2, 60) for _ in range(3)}
    texts = prompts(_COUNT, seed)
    ids: list[int] = []
    found: dict[tuple[int, int], tuple[list[int], list[Any]]] = {}
    for step in range(500):
        while len(ids) < len(asked) and arrivals[len(ids)] <= step:
            ids.append(llm.engine.add_request(texts[len(ids)], asked[len(ids)]))
        for request, at in aborts.items():
            if at == step and request < len(ids):
                llm.engine.abort(ids[request])
        for out in llm.engine.step():
            assert out.error is None
            new, logprobs = found.setdefault((ids.index(out.request_id), out.index), ([], []))
            new.extend(out.new_token_ids)
            logprobs.extend(out.logprobs or [])
    assert llm.engine.is_finished()
    return found
