"""Layers on their own: purity of the norm, shards of the linear layers, refusal of unknown rope types."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.config import ModelConfig
from models.int4 import Int4Matrix
from models.layers.embed_head import Embedding, Head
from models.layers.layernorm import RMSNorm
from models.layers.linear import GateUpLinear, QKVLinear, RowLinear
from models.layers.packed import INT4_MAX_ROWS, can_pack, can_pack_int4
from models.layers.rotary import RotaryEmbedding, rope_frequencies

CPU = torch.device("cpu")
FP32 = torch.float32


def config(**overrides: object) -> ModelConfig:
    settings: dict = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        **overrides,
    }
    return ModelConfig(**settings)


# ---------------------------------------------------------------------- RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_leaves_its_input_and_the_residual_alone(dtype: torch.dtype) -> None:
    norm = RMSNorm(32, 1e-5, dtype, CPU)
    norm.weight.data.uniform_(0.5, 1.5)
    x, residual = torch.randn(5, 32).to(dtype), torch.randn(5, 32).to(dtype)
    x_before, residual_before = x.clone(), residual.clone()
    normed, total = norm.add_and_norm(x, residual)
    assert torch.equal(x, x_before) and torch.equal(residual, residual_before)
    assert torch.equal(total, x.float() + residual.float())
    assert torch.equal(normed, norm(total))
    assert total.data_ptr() not in (x.data_ptr(), residual.data_ptr())
    norm(x)
    assert torch.equal(x, x_before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_normalised_in_fp32(dtype: torch.dtype) -> None:
    """300 squared overflows fp16, and a bf16 sum of 576 squares would lose most of its digits."""
    norm = RMSNorm(576, 1e-5, dtype, CPU)
    norm.weight.data.fill_(1.0)
    x = (torch.randn(3, 576) * 300).to(dtype)
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)
    got, expected = norm(x), exact.to(dtype)
    torch.testing.assert_close(got, expected, rtol=torch.finfo(dtype).eps, atol=0)  # one unit in the last place
    assert (got != expected).float().mean() < 0.005


# ---------------------------------------------------------------------- linear shards


def load(parameter: torch.nn.Parameter, tensors: dict[str | None, torch.Tensor]) -> None:
    assert set(parameter.parts) == set(tensors)
    for part, tensor in tensors.items():
        parameter.weight_loader(tensor, part)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 1), (4, 2, 2), (8, 4, 2), (8, 2, 4), (8, 1, 4)])
def test_qkv_shards_give_every_rank_its_heads(heads: int, kv_heads: int, size: int) -> None:
    dim, hidden = 8, 16
    names = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    weights = {name: torch.randn(count * dim, hidden) for name, count in names.items()}
    biases = {name: torch.randn(count * dim) for name, count in names.items()}
    x = torch.randn(3, hidden)
    whole = {name: F.linear(x, weights[name], biases[name]).view(3, -1, dim) for name in names}
    group = heads // kv_heads
    for rank in range(size):
        layer = QKVLinear(hidden, heads, kv_heads, dim, True, FP32, CPU, rank, size)
        load(layer.weight, weights)
        load(layer.bias, biases)
        q, k, v = layer(x).view(3, -1, dim).split((layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), dim=1)
        first = rank * layer.num_heads
        torch.testing.assert_close(q, whole["q_proj"][:, first : first + layer.num_heads])
        # Each of this rank's query heads finds, at its place in the group, the KV head that belongs to it.
        for local in range(layer.num_heads):
            own = local // (layer.num_heads // layer.num_kv_heads)
            torch.testing.assert_close(k[:, own], whole["k_proj"][:, (first + local) // group])
            torch.testing.assert_close(v[:, own], whole["v_proj"][:, (first + local) // group])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_and_merged_shards_sum_to_the_whole_with_one_bias(size: int) -> None:
    hidden, inner = 12, 16
    gate, up, down, bias = (
        torch.randn(inner, hidden) / hidden**0.5,
        torch.randn(inner, hidden) / hidden**0.5,
        torch.randn(hidden, inner) / inner**0.5,
        torch.randn(hidden),
    )
    x = torch.randn(5, hidden)
    whole = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down, bias)
    total = torch.zeros(5, hidden)
    for rank in range(size):
        first = GateUpLinear(hidden, inner, False, FP32, CPU, rank, size)
        second = RowLinear(inner, hidden, True, FP32, CPU, rank, size)
        load(first.weight, {"gate_proj": gate, "up_proj": up})
        load(second.weight, {None: down})
        load(second.bias, {None: bias})
        total += second(first(x))
    torch.testing.assert_close(total, whole)


def test_heads_that_do_not_split_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="9 query heads do not divide evenly by 2"):
        QKVLinear(32, 9, 3, 8, False, FP32, CPU, 0, 2)


def test_a_weight_of_the_wrong_shape_is_refused_with_both_shapes() -> None:
    layer = RowLinear(16, 8, False, FP32, CPU)
    with pytest.raises(ValueError, match=r"\(16, 8\) does not fit \(8, 16\)"):
        layer.weight.weight_loader(torch.zeros(16, 8), None)


def test_a_tied_head_shares_the_embedding_and_gives_fp32_logits() -> None:
    embedding = Embedding(10, 4, torch.bfloat16, CPU)
    head = Head(10, 4, torch.bfloat16, CPU, embedding)
    assert head.weight is embedding.weight
    embedding.weight.data.normal_()
    assert head(torch.randn(2, 4).bfloat16()).dtype == torch.float32


# ---------------------------------------------------------------------- rope


@pytest.mark.parametrize("kind", ["longrope", "mrope", "su", "proportional"])
def test_an_unknown_rope_type_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ValueError, match=f"rope type '{kind}' is not supported"):
        RotaryEmbedding(config(rope_scaling={"rope_type": kind, "factor": 2.0}), FP32, CPU)


def test_a_rope_type_without_its_parameter_names_it() -> None:
    with pytest.raises(ValueError, match="'low_freq_factor'"):
        rope_frequencies(config(rope_scaling={"rope_type": "llama3", "factor": 2.0}))


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3"])
def test_a_factor_that_is_null_is_one_that_is_missing(kind: str) -> None:
    with pytest.raises(ValueError, match="needs 'factor'"):
        rope_frequencies(config(rope_scaling={"rope_type": kind, "factor": None, "low_freq_factor": 1.0}))


def test_frequency_factors_divide_the_frequencies() -> None:
    plain, _ = rope_frequencies(config())
    divided, scale = rope_frequencies(
        config(rope_scaling={"rope_type": "frequency_factors", "factors": [1.0, 2.0, 4.0, 8.0]})
    )
    assert torch.equal(divided, plain / torch.tensor([1.0, 2.0, 4.0, 8.0])) and scale == 1.0


# ---------------------------------------------------------------------- packed weights


def bf16_layer(out: int = 48, inner: int = 64) -> RowLinear:
    layer = RowLinear(inner, out, True, torch.bfloat16, CPU)
    layer.weight.data.normal_()
    layer.bias.data.normal_()
    if not can_pack(layer.weight):
        pytest.skip("this CPU has no bf16 instructions: weights stay as they are")
    return layer


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 600])
def test_a_packed_product_equals_the_plain_one_to_a_rounding(rows: int) -> None:
    layer = bf16_layer()
    x = torch.randn(rows, 64).bfloat16()
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    layer.pack_weight()
    assert layer.packed is not None
    torch.testing.assert_close(layer(x).double(), exact, rtol=2**-7, atol=2**-5)


def test_packing_frees_the_plain_weight_unless_the_embedding_reads_it() -> None:
    layer = bf16_layer()
    layer.pack_weight()
    assert layer.weight.numel() == 0
    embedding = Embedding(10, 64, torch.bfloat16, CPU)
    embedding.weight.data.normal_()
    head = Head(10, 64, torch.bfloat16, CPU, embedding)
    head.pack_weight()
    assert embedding.weight.shape == (10, 64)
    assert torch.equal(embedding(torch.tensor([3]))[0], embedding.weight[3])


def test_the_likeliest_logits_of_half_precision_weights_are_exact_to_fp32() -> None:
    """A product that ends in bf16 is wrong by up to 0.06 at logits near 20."""
    embedding = Embedding(300, 64, torch.bfloat16, CPU)
    embedding.weight.data.normal_(std=2.0)
    head = Head(300, 64, torch.bfloat16, CPU, embedding)
    head.pack_weight()
    for rows in (1, 8):
        x = torch.randn(rows, 64).bfloat16()
        exact = x.double() @ embedding.weight.double().t()
        got = head(x).double()
        best = exact.topk(32).indices
        torch.testing.assert_close(got.gather(1, best), exact.gather(1, best), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(got, exact, rtol=2**-7, atol=2**-5)


def int4_matrix(rows: int, columns: int) -> Int4Matrix:
    q = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    scale = torch.rand(rows, columns // 32) + 0.5
    return Int4Matrix(q, scale, -7.5 * scale + torch.randn_like(scale))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, INT4_MAX_ROWS, INT4_MAX_ROWS + 1, 300])
def test_packed_swiglu_equals_the_plain_one_from_dense_and_from_4_bit_weights(rows: int, bias: bool) -> None:
    """rows on both sides of the change from the 4-bit product to the dense one."""
    torch.manual_seed(rows)
    x = torch.randn(rows, 64).bfloat16() / 16
    gate, up = int4_matrix(48, 64), int4_matrix(48, 64)
    biases = {"gate_proj": torch.randn(48), "up_proj": torch.randn(48)}
    g, u = (
        x.double() @ w.dequantize().double().t() + (b.bfloat16().double() if bias else 0)
        for w, b in zip((gate, up), biases.values(), strict=True)
    )
    for four_bits in (False, True):
        layer = GateUpLinear(64, 48, bias, torch.bfloat16, CPU)
        parts = {"gate_proj": gate, "up_proj": up}
        load(layer.weight, parts if four_bits else {name: w.dequantize() for name, w in parts.items()})
        if layer.bias is not None:
            load(layer.bias, biases)
        expected_int4 = four_bits and can_pack_int4(layer.weight)
        layer.pack_weight()
        assert (layer.int4 is not None) == expected_int4
        torch.testing.assert_close(layer(x).double(), F.silu(g) * u, rtol=2**-5, atol=2**-4)


def test_4_bit_rows_are_put_together_in_the_order_of_the_parts_whatever_order_they_come_in() -> None:
    layer = QKVLinear(64, 2, 1, 16, False, torch.bfloat16, CPU)
    q, k, v = int4_matrix(32, 64), int4_matrix(16, 64), int4_matrix(16, 64)
    load(layer.weight, {"v_proj": v, "q_proj": q, "k_proj": k})
    if not can_pack_int4(layer.weight):
        pytest.skip("this CPU has no vectorised 4-bit product")
    layer.pack_weight()
    assert layer.int4 is not None
    x = torch.randn(3, 64).bfloat16()
    exact = x.double() @ Int4Matrix.stack([q, k, v]).dequantize().double().t()
    torch.testing.assert_close(layer(x).double(), exact, rtol=2**-6, atol=0.25)


def test_a_layer_with_only_some_parts_in_4_bits_computes_with_dense_weights() -> None:
    layer = GateUpLinear(64, 48, False, torch.bfloat16, CPU)
    gate, up = int4_matrix(48, 64), torch.randn(48, 64)
    load(layer.weight, {"gate_proj": gate, "up_proj": up})
    layer.pack_weight()
    assert layer.int4 is None
    x = torch.randn(2, 64).bfloat16() / 16
    exact = F.silu(x.double() @ gate.dequantize().double().t()) * (x.double() @ up.double().t())
    torch.testing.assert_close(layer(x).double(), exact, rtol=2**-5, atol=2**-3)


@pytest.mark.parametrize(("dim", "start", "length"), [(0, 3, 5), (1, 32, 64), (1, 16, 64)])
def test_a_share_of_a_4_bit_matrix_is_the_share_of_its_values(dim: int, start: int, length: int) -> None:
    matrix = int4_matrix(16, 128)
    share = matrix.narrow(dim, start, length)
    assert isinstance(share, Int4Matrix) == (dim == 0 or start % 32 == 0)
    values = share.dequantize() if isinstance(share, Int4Matrix) else share
    assert torch.equal(values, matrix.dequantize().narrow(dim, start, length))


def test_fp32_weights_are_never_packed() -> None:
    layer = RowLinear(8, 4, False, FP32, CPU)
    layer.pack_weight()
    assert layer.packed is None and layer.weight.shape == (4, 8)
