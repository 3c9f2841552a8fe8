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

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token takes over all layers, on one rank."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * dtype_bytes
