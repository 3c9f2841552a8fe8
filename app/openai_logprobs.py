"""Log-probabilities in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.outputs import TokenLogprobs

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer

LOWEST = -9999.0  # OpenAI's word for "impossible"; JSON has no -inf


def choice_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` of a choice."""
    return {
        "content": [
            _token(entry.token_id, entry.logprob, tokenizer)
            | {"top_logprobs": [_token(token_id, logprob, tokenizer) for token_id, logprob in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    """`bytes` are the token's own; part of a character shows as U+FFFD in `token`."""
    data = tokenizer.token_bytes(token_id)
    if not data:  # a special token, or a tokenizer that is not byte-level
        data = tokenizer.decode([token_id], skip_special_tokens=False).encode()
    return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, LOWEST), "bytes": list(data)}
