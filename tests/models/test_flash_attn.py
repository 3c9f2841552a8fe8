"""The flash_attn backend over a stand-in for the package: its signatures and its conditions, computed in plain PyTorch.

That the package itself computes the same is not shown here: no build of it was at hand.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from attention_case import MIXES, Case
from engine.config import EngineConfig
from engine.device import DevicePlan
from engine.loading import load_parts
from models.layers import flash_attn
from models.layers.attention import get_backend
from models.layers.flash_attn import FlashAttnBackend

BLOCK = 256


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [N, Hq, D] at the end of k, v [M, Hkv, D]: causal, aligned to the bottom right."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    n, m = q.shape[0], k.shape[0]
    masked = torch.arange(m)[None, :] > torch.arange(m - n, m)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(masked, float("-inf")).softmax(-1), v).to(q.dtype)


def check_cache(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert q.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    assert table.dtype == lens.dtype == torch.int32 and table.stride(-1) == 1


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None,
):  # fmt: skip
    check_cache(q, k, v, block_table, cu_seqlens_k)
    assert cu_seqlens_q.dtype == torch.int32 and causal
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert q_ends[-1] == len(q) and block_table.shape[0] == len(q_ends) - 1
    lengths = [(b - a, d - c) for a, b, c, d in zip(q_ends, q_ends[1:], k_ends, k_ends[1:], strict=False)]
    assert max_seqlen_q == max(n for n, _ in lengths) and max_seqlen_k == max(m for _, m in lengths)
    out = torch.empty_like(q)
    for i, (_, m) in enumerate(lengths):
        pages = block_table[i].long()
        keys, values = k[pages].flatten(0, 1)[:m], v[pages].flatten(0, 1)[:m]
        rows = slice(q_ends[i], q_ends[i + 1])
        out[rows] = attend(q[rows], keys, values, softmax_scale)
    return out


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    check_cache(q, k_cache, v_cache, block_table, cache_seqlens)
    assert q.dim() == 4 and q.shape[0] == len(cache_seqlens) == len(block_table)
    assert k is None and v is None, "the backend writes the cache itself"
    out = torch.empty_like(q)
    for i, length in enumerate(cache_seqlens.tolist()):
        pages = block_table[i].long()
        keys, values = k_cache[pages].flatten(0, 1)[:length], v_cache[pages].flatten(0, 1)[:length]
        out[i] = attend(q[i], keys, values, softmax_scale)
    return out


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("flash_attn")
    made.__dict__.update(
        __version__="2.8.3",
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )
    monkeypatch.setitem(sys.modules, "flash_attn", made)
    return made


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (4, 4, 128), (9, 3, 64)])
@pytest.mark.parametrize("mix", [*MIXES, "across pages"])
def test_attention_over_pages_equals_attention_written_out(
    package: ModuleType, mix: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    lengths = MIXES.get(mix, [(600, 1), (256, 1), (255, 1), (300, 40), (0, 257), (512, 3)])
    case = Case(0, lengths, heads=heads, kv_heads=kv_heads, dim=dim, block_size=BLOCK, dtype=dtype)
    rounding = {torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for index, out in enumerate(case.run(get_backend("flash_attn"))):
        torch.testing.assert_close(out.double(), case.expected(index), atol=rounding, rtol=rounding)


def test_without_the_package_the_reason_is_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert flash_attn.why_unusable() == "the package flash_attn is not installed"
    with pytest.raises(ImportError, match="flash_attn is not installed"):
        FlashAttnBackend()


def test_a_package_built_for_another_torch_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10\\nmore')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert flash_attn.why_unusable() == "the package flash_attn does not load: undefined symbol: _ZN3c10"


def test_a_version_without_paged_caches_is_told(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash_attn.why_unusable() is None
    monkeypatch.setattr(package, "flash_attn_varlen_func", lambda q, k, v, cu_seqlens_q, cu_seqlens_k: q)
    monkeypatch.setattr(package, "__version__", "2.3.0")
    assert flash_attn.why_unusable() == "flash_attn 2.3.0 reads no paged cache; version 2.5 and later do"


@pytest.mark.parametrize(("dim", "taken"), [(64, True), (256, True), (320, False), (20, False)])
def test_only_heads_that_the_package_takes(dim: int, taken: bool) -> None:
    assert (flash_attn.why_not_head_dim(dim) is None) == taken


def test_a_model_with_heads_that_it_does_not_take_is_refused_before_its_weights_are_read(
    make_tiny_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model("qwen3", head_dim=320)
    plan = DevicePlan(torch.device("cuda", 0), torch.bfloat16, "flash_attn", BLOCK, ())
    monkeypatch.setattr("engine.loading.DeviceManager.resolve", lambda self: plan)
    config = EngineConfig(model=str(folder), attention_backend="flash_attn")
    with pytest.raises(ValueError, match=r"attention_backend='flash_attn' .* this model's have 320; use 'triton'"):
        load_parts(config, lambda stage, percent: None)
