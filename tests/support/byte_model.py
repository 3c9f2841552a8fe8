"""An engine whose tokens are bytes and whose replies are written out beforehand, for tests about text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

import history_model
from engine.llm_engine import LLMEngine

EOS = 256
BOS = 257


class ByteTokenizer:
    """Token i is the byte i; 256 ends a turn, 257 begins a text. Every prompt ends with a line feed."""

    bos_token_id, eos_token_ids, special_ids = BOS, (EOS,), frozenset({EOS, BOS})

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        return [BOS] * add_bos + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def encode_chat(self, messages: Sequence[dict]) -> list[int]:
        return [BOS, *" ".join(f"{m['role']}: {m['content']}" for m in messages).encode(), 10]


def replying_engine(monkeypatch: pytest.MonkeyPatch, reply: str | bytes) -> LLMEngine:
    """A real LLMEngine whose model answers every prompt with `reply`, a byte a step, then the end of its turn."""
    script = [*(reply.encode() if isinstance(reply, str) else reply), EOS]
    monkeypatch.setattr(
        history_model, "next_token", lambda history: script[min(len(history) - history.index(10) - 1, len(script) - 1)]
    )
    engine = history_model.history_engine(64, 4, max_model_len=200)
    engine.model_config = replace(engine.model_config, vocab_size=258, eos_token_ids=(EOS,))
    engine.tokenizer = ByteTokenizer()  # type: ignore[assignment]
    return engine
