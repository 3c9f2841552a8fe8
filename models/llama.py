"""Llama (Touvron et al., arXiv:2302.13971): pre-norm decoder with rotary positions, grouped KV heads and SwiGLU."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from models.batch import ForwardBatch
from models.config import ModelConfig
from models.layers.attention import Attention, AttentionBackend, bind_kv_cache
from models.layers.embed_head import Embedding, Head
from models.layers.layernorm import RMSNorm
from models.layers.linear import GateUpLinear, QKVLinear, RowLinear
from models.layers.parallel import AllReduce, GatherVocab
from models.layers.rotary import RotaryEmbedding, rotate

if TYPE_CHECKING:
    from models.layers.layernorm import Hidden
    from models.native.decoder import Decoder


class LlamaAttention(nn.Module):
    """Queries, keys and values by one product, rotated together, then attention over the pages.

    The layer calls qkv_proj, together with the norm before it (RMSNorm.into), and hands over what comes out; and it
    calls o_proj, through all_reduce.
    """

    def __init__(self, config: ModelConfig, backend: AttentionBackend, **place: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv_proj = QKVLinear(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.attention_bias,
            **place,
        )
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.o_proj = RowLinear(
            config.num_attention_heads * config.head_dim, config.hidden_size, config.attention_bias, **place
        )
        self.all_reduce = AllReduce(place["tp_rank"], place["tp_size"])
        self.attn = Attention(self.num_heads, self.num_kv_heads, config.head_dim, config.head_dim**-0.5, backend)
        self.norms: tuple[Tensor, Tensor, float] | None = None  # of queries, of keys, eps: for those that have them
        self.fused = backend.has_forward_qkv

    def forward(self, qkv: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """qkv_proj's output [T, (heads + 2 * kv_heads) * head_dim] -> o_proj's input [T, heads * head_dim]."""
        if self.fused:
            return self.attn.forward_qkv(qkv, self.norms, rope, batch)
        return self.attn(*self.rotate(qkv.view(qkv.shape[0], -1, self.head_dim), rope), batch)

    def rotate(self, qkv: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, heads, head_dim] -> queries and keys, rotated, and values."""
        rotated = rotate(qkv[:, : self.num_heads + self.num_kv_heads], *rope)
        v = qkv[:, self.num_heads + self.num_kv_heads :]
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], v


class LlamaMLP(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202): down(silu(gate(x)) * up(x)); gate_up_proj ends in the product.

    The layer calls gate_up_proj, together with the norm before it (RMSNorm.into), and hands over what comes out.
    """

    def __init__(self, config: ModelConfig, **place: Any) -> None:
        super().__init__()
        self.gate_up_proj = GateUpLinear(config.hidden_size, config.intermediate_size, config.mlp_bias, **place)
        self.down_proj = RowLinear(config.intermediate_size, config.hidden_size, config.mlp_bias, **place)
        self.all_reduce = AllReduce(place["tp_rank"], place["tp_size"])

    def forward(self, gated: Tensor, next_norm: RMSNorm | None, residual: Tensor) -> Hidden:
        """gate_up_proj's output [T, intermediate] -> [T, hidden]. next_norm: see AllReduce."""
        return self.all_reduce(self.down_proj, gated, next_norm, residual)


class LlamaDecoderLayer(nn.Module):
    attention_class: type[nn.Module] = LlamaAttention

    def __init__(self, config: ModelConfig, backend: AttentionBackend, **place: Any) -> None:
        super().__init__()
        norm_place = {"dtype": place["dtype"], "device": place["device"]}
        self.self_attn: Any = self.attention_class(config, backend, **place)
        self.mlp = LlamaMLP(config, **place)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **norm_place)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **norm_place)

    def forward(
        self,
        x: Hidden,
        residual: Tensor | None,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        rows: Tensor | None = None,
        next_norm: RMSNorm | None = None,
    ) -> tuple[Hidden, Tensor]:
        """(x, residual) with the hidden state x + residual -> the same pair after this layer, of `rows` only, int64
        [R], where those are given: what the others add to the KV cache is there all the same. next_norm: the norm that
        the result goes into; given, x may be the hidden state itself, Added or Normed, and residual what was added to
        it."""
        qkv, residual = self.input_layernorm.into(self.self_attn.qkv_proj, x, residual)
        attended = self.self_attn(qkv, rope, batch)
        if rows is not None:
            # In this order: the projection may begin to read the residual while the kernel just before it still runs.
            residual = residual.index_select(0, rows)
            attended = attended.index_select(0, rows)
        norm, attention = self.post_attention_layernorm, self.self_attn
        x = attention.all_reduce(attention.o_proj, attended, norm, residual)
        gated, residual = norm.into(self.mlp.gate_up_proj, x, residual)
        return self.mlp(gated, next_norm, residual), residual


class LlamaModel(nn.Module):
    def __init__(
        self, config: ModelConfig, layer_class: type[nn.Module], backend: AttentionBackend, **place: Any
    ) -> None:
        super().__init__()
        dtype, device = place["dtype"], place["device"]
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        self.layers = nn.ModuleList(layer_class(config, backend, **place) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.rotary = RotaryEmbedding(config, dtype, device)

    def forward(self, batch: ForwardBatch) -> Tensor:
        x: Hidden = self.embed_tokens(batch.input_ids)
        residual: Tensor | None = None
        rope = self.rotary(batch)
        for layer, following in pairwise(self.layers):
            x, residual = layer(x, residual, rope, batch, next_norm=following.input_layernorm)
        # Past the last layer's attention only the rows that are sampled from matter: of a prompt, one.
        # (Of padded rows there may be as many as tokens: only decodes alone are in their order.)
        rows = batch.logits_indices if batch.num_decodes < batch.input_ids.shape[0] else None
        x, residual = self.layers[-1](x, residual, rope, batch, rows)
        assert isinstance(x, Tensor)  # no norm was named that could have begun
        return self.norm.add_and_norm(x, residual)[0] if residual is not None else self.norm(x)


class LlamaForCausalLM(nn.Module):
    """The whole model. Weight names below it are those of the Hugging Face checkpoint, fused ones apart."""

    layer_class: type[nn.Module] = LlamaDecoderLayer

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        super().__init__()
        self.config = config
        place = {"dtype": dtype, "device": device, "tp_rank": tp_rank, "tp_size": tp_size}
        self.model = LlamaModel(config, self.layer_class, backend, **place)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = Head(config.vocab_size, config.hidden_size, dtype, device, tied, tp_rank, tp_size)
        self.gather_vocab = GatherVocab(config.vocab_size, tp_rank, tp_size)
        self.decoder: Decoder | None = None  # runs steps of few tokens, where the loader found that it can
        self.why_no_decoder: str | None = "not loaded"
        # Counted now: packing moves weights out of the parameters.
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [R, hidden] of the rows batch.logits_indices, after the final norm."""
        if self.decoder is not None and self.decoder.takes(batch):
            return self.decoder(batch)
        return self.model(batch)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor | None:
        """Hidden states [R, hidden] -> float32 logits [R, vocab] on rank 0, None on the others. out: where they are to
        stand, on rank 0, of lm_head.out_dtype."""
        if self.decoder is not None and out is None and hidden.shape[0] <= self.decoder.max_rows:
            return self.decoder.logits(hidden)
        if self.gather_vocab.tp_size == 1:
            return self.lm_head(hidden, out)
        shard = hidden.new_empty(hidden.shape[0], self.lm_head.rows, dtype=self.lm_head.out_dtype)
        logits = self.gather_vocab(self.lm_head(hidden, shard), out)
        return logits if logits is None or out is not None else logits.float()

    def bind_kv_cache(self, kv: Tensor) -> None:
        """kv [layers, 2, num_blocks, block_size, this rank's kv_heads, head_dim]; must hold finite values (zeros)."""
        bind_kv_cache(self, kv)
