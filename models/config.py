"""ModelConfig: the shape of a model, as plain data that every other module may import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ModelConfig:
    """The hyperparameters of one decoder-only transformer, whatever file they came from.

    `architecture` is the Hugging Face class name ("LlamaForCausalLM"); the registry maps it to ours.
    `rope_scaling` is None or the dict of the checkpoint with its key "rope_type" always present.
    `eos_token_ids` holds every id that ends a turn (config.json and generation_config.json joined).
    `dtype` is the checkpoint's own ("float32", "bfloat16", "float16"), None when it names none.
    `raw` keeps the source's dict for what only one architecture reads.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None
    raw: dict[str, Any] = field(default_factory=dict)

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """KV heads that each of tp_size ranks keeps: an even share, or one that several ranks hold alike."""
        return max(1, self.num_key_value_heads // tp_size)

    def kv_bytes_per_token(self, dtype_bytes: int, tp_size: int = 1) -> int:
        """Bytes of keys and values that one token takes over all layers, on one of tp_size ranks."""
        return 2 * self.num_hidden_layers * self.kv_heads_per_rank(tp_size) * self.head_dim * dtype_bytes

    def check_ranks(self, tp_size: int) -> None:
        """Raises ValueError, with the numbers, for a model that does not split evenly over tp_size ranks."""
        why = self._why_not_split(tp_size)
        if why is not None:
            fitting = [n for n in range(1, self.num_attention_heads + 1) if self._why_not_split(n) is None]
            raise ValueError(
                f"tensor_parallel_size={tp_size} does not fit this model: {why} ({', '.join(map(str, fitting))} would)"
            )

    def _why_not_split(self, tp_size: int) -> str | None:
        heads, kv_heads, inner = self.num_attention_heads, self.num_key_value_heads, self.intermediate_size
        if heads % tp_size:
            return f"its {heads} query heads do not divide evenly by {tp_size}"
        if tp_size <= kv_heads and kv_heads % tp_size:
            return f"its {kv_heads} KV heads do not divide evenly by {tp_size}"
        if tp_size > kv_heads and tp_size % kv_heads:
            return f"{tp_size} ranks do not divide evenly over its {kv_heads} KV heads"
        if inner % tp_size:
            return f"its intermediate size of {inner} does not divide evenly by {tp_size}"
        return None
