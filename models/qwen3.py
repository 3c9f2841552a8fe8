"""Qwen3 (arXiv:2505.09388): Llama with an RMSNorm on every query and key head before the rotation."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from models.config import ModelConfig
from models.layers.attention import AttentionBackend
from models.layers.layernorm import RMSNorm
from models.layers.rotary import rotate
from models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: ModelConfig, backend: AttentionBackend, **place: Any) -> None:
        super().__init__(config, backend, **place)
        dtype, device = place["dtype"], place["device"]
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device)
        self.norms = self.q_norm.weight, self.k_norm.weight, config.rms_norm_eps

    def rotate(self, qkv: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, heads, head_dim] -> queries and keys, normed and rotated, and values."""
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        return rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope), v


class Qwen3DecoderLayer(LlamaDecoderLayer):
    attention_class: type[nn.Module] = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer_class: type[nn.Module] = Qwen3DecoderLayer
