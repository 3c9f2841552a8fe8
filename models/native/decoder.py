"""Steps of few tokens of a model with 4-bit weights by decode.c: what it takes, what it is given, what comes back."""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.batch import ForwardBatch
from models.config import ModelConfig
from models.int4 import GROUP
from models.native import layout, library

if TYPE_CHECKING:
    from models.layers.linear import Linear
    from models.llama import LlamaForCausalLM


class _Draw(Structure):
    _fields_ = (
        ("rows", c_int64), ("vocab", c_int64),
        *((name, c_void_p) for name in ("logits", "best", "temperatures", "hashes", "keys", "drawn")),
    )  # fmt: skip


DTYPES = (torch.bfloat16, torch.float32)


class _Matrix(Structure):
    _fields_ = (("rows", c_int64), ("columns", c_int64), ("q", c_void_p), ("scale", c_void_p))


class _Layer(Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
    )


class _Model(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_layers", "hidden", "heads", "kv_heads", "dim", "inner")),
        ("eps", c_float), ("scale", c_float), ("layers", POINTER(_Layer)), ("final_norm", c_void_p),
        ("vocab", c_int64), ("head", c_void_p),
    )  # fmt: skip


class _Step(Structure):
    _fields_ = (
        ("rows", c_int64),
        *((name, c_void_p) for name in ("x", "hidden", "cos", "sin", "k_cache", "v_cache")),
        ("layer_stride", c_int64), ("block_size", c_int64), ("slots", c_void_p), ("tables", c_void_p),
        ("table_stride", c_int64), ("lengths", c_void_p), ("logits", c_void_p),
    )  # fmt: skip


def why_not(config: ModelConfig, dtype: torch.dtype, device: torch.device, tp_size: int) -> str | None:
    """What keeps a model from being decoded by decode.c, whatever its weights are; None where nothing does."""
    if device.type != "cpu" or tp_size > 1:
        return "it is for one process on a CPU"
    if dtype not in DTYPES:
        return f"it computes in bfloat16 and float32, not in {str(dtype).removeprefix('torch.')}"
    if config.head_dim % GROUP:
        return f"heads of {config.head_dim} are not a multiple of {GROUP}"
    try:
        library.load(dtype == torch.bfloat16)
    except library.Unavailable as error:
        return str(error)
    return None


def why_not_loaded(model: LlamaForCausalLM) -> str | None:
    """What of a model's weights, loaded but not yet packed, keeps it from that; None where nothing does."""
    for linear in (linear for layer in model.model.layers for linear in _linears(layer)):
        rows, columns = linear.weight.shape
        if linear.bias is not None or not linear.is_int4():
            return "it takes 4-bit weights without a bias, and not all of this model's are"
        if not layout.takes(rows, columns):
            return f"it does not take a matrix of {rows} x {columns}"
    return None


def most_rows(dtype: torch.dtype) -> int:
    """Up to how many tokens a step is faster here than by PyTorch, whose products of bfloat16 may be AMX's."""
    if dtype == torch.float32:
        return 64
    return 16 if torch.cpu._is_amx_tile_supported() else 32


class Decoder:
    """Runs such steps of a loaded model for which why_not() and why_not_loaded() found nothing. Up to max_rows tokens a
    row's result does not depend on those beside it."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        config, self._dtype = model.config, model.lm_head.weight.dtype
        self.max_rows = most_rows(self._dtype)
        self._embed, self._rotary = model.model.embed_tokens, model.model.rotary
        layers: Any = model.model.layers
        self._first, self._last, self._count = layers[0].self_attn.attn, layers[-1].self_attn.attn, len(layers)
        self._vocab = model.lm_head.weight.shape[0]
        self._kept: list[Any] = [model.lm_head.weight.data]  # what the structs point to
        structs = (_Layer * self._count)(*map(self._layer, layers))
        self._model = _Model(
            self._count, config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
            config.intermediate_size, config.rms_norm_eps, self._first.scale, structs,
            self._pointer(model.model.norm.weight), self._vocab, model.lm_head.weight.data_ptr(),
        )  # fmt: skip
        loaded = library.load(self._dtype == torch.bfloat16)
        self._layers, self._logits = loaded.decode_layers, loaded.decode_logits
        self._layers.argtypes = self._logits.argtypes = (c_void_p, c_void_p, c_int)
        self.draw = Draw(loaded)

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether it runs this step."""
        return batch.input_ids.shape[0] <= self.max_rows

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """The step's hidden states after the final norm, as LlamaModel's; all keys and values are in the cache then."""
        k_cache, v_cache = self._first.k_cache, self._first.v_cache
        if k_cache.dtype != self._dtype or not k_cache.is_contiguous():
            raise ValueError(f"a KV cache of {k_cache.dtype}, strides {k_cache.stride()}, for a model of {self._dtype}")
        x = self._embed(batch.input_ids).float()
        hidden = torch.empty(x.shape, dtype=self._dtype, device="cpu")
        cos, sin = (angles.float() for angles in self._rotary(batch))
        tables, lengths = batch.block_tables, (batch.positions + 1).to(torch.int32)
        if batch.num_decodes < x.shape[0]:  # chunks have several rows
            tables = tables.repeat_interleave(torch.tensor(batch.query_lens, device="cpu"), dim=0)
        stride = (self._last.k_cache.data_ptr() - k_cache.data_ptr()) // k_cache.element_size()
        step = _Step(
            x.shape[0], x.data_ptr(), hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), k_cache.data_ptr(),
            v_cache.data_ptr(), stride // max(1, self._count - 1), batch.block_size, batch.slot_mapping.data_ptr(),
            tables.data_ptr(), tables.stride(0), lengths.data_ptr(), None,
        )  # fmt: skip
        self._run(self._layers, step)
        return hidden if batch.num_decodes == x.shape[0] else hidden.index_select(0, batch.logits_indices)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] of the model's type -> float32 [R, vocab], R at most max_rows."""
        hidden = hidden.contiguous()
        logits = torch.empty(hidden.shape[0], self._vocab, dtype=torch.float32, device="cpu")
        step = _Step(rows=hidden.shape[0], hidden=hidden.data_ptr(), logits=logits.data_ptr())
        self._run(self._logits, step)
        return logits

    def _run(self, call: Any, step: _Step) -> None:
        if call(byref(self._model), byref(step), torch.get_num_threads()):
            raise MemoryError(f"no room for the products of {step.rows} tokens")

    def _layer(self, layer: Any) -> _Layer:
        attention = layer.self_attn
        norms = [layer.input_layernorm.weight, layer.post_attention_layernorm.weight, *(attention.norms or ())[:2]]
        return _Layer(*map(self._matrix, _linears(layer)), *map(self._pointer, norms))

    def _matrix(self, linear: Linear) -> _Matrix:
        assert linear.native is not None
        self._kept.append(linear.native)
        q, scale = linear.native.q, linear.native.scale
        return _Matrix(q.shape[0], q.shape[1] * layout.SPAN, q.data_ptr(), scale.data_ptr())

    def _pointer(self, weight: Tensor) -> int:
        self._kept.append(weight.data.float().contiguous())
        return self._kept[-1].data_ptr()


class Draw:
    """draw(logits, best, temperature, token_hash, keys) -> int64 [N] drawn from logits float32 [N, V] at temperatures
    [N, 1], best [N, 1] being the largest of each: Sampler's race with TokenNoise's noise, whose token_hash int32 [V]
    and row keys int32 [N, 2] are given. Holds nothing of a model."""

    def __init__(self, loaded: CDLL) -> None:
        self._draw = loaded.draw
        self._draw.argtypes, self._draw.restype = (c_void_p, c_int), None

    def __call__(self, logits: Tensor, best: Tensor, temperature: Tensor, token_hash: Tensor, keys: Tensor) -> Tensor:
        rows, vocab = logits.shape
        drawn = torch.empty(rows, dtype=torch.int64, device="cpu")
        inputs = [tensor.contiguous() for tensor in (logits, best, temperature, token_hash, keys)]
        call = _Draw(rows, vocab, *(tensor.data_ptr() for tensor in inputs), drawn.data_ptr())
        self._draw(byref(call), torch.get_num_threads())
        return drawn


def _linears(layer: Any) -> tuple[Linear, Linear, Linear, Linear]:
    """In the order of decode.c's struct."""
    return layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj
