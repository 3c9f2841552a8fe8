"""The Triton kernels are compiled for a Hopper card on a machine without one: the interpreter accepts what the compiler
refuses, such as a variable whose type differs between two branches."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from models import kernels
from models.batch import SharedPrefixes
from models.kernels import (
    gemv,
    overlap,
    paged_decode,
    paged_prefill,
    rmsnorm,
    rope_cache,
    sampling,
    shared_prefix,
    silu_mul,
    skinny,
    step_rows,
    sum_norm,
    truncation,
)
from models.kernels.few_rows import FewRows
from models.kernels.own_keys import OwnKeys
from models.kernels.paged_keys import Partials
from models.kernels.rmsnorm import Norm
from models.kernels.rope_cache import Rotation
from models.kernels.row_settings import RowSettings

HOPPER, ADA = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 89, 32)  # an L4 or a GeForce RTX 4090 is Ada
HOPPER_SHARED_BYTES, ADA_SHARED_BYTES = 227 * 1024, 99 * 1024
BF16, CPU = torch.bfloat16, torch.device("cpu")
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"} | {
    torch.float64: "*fp64",
    torch.int16: "*i16",
}


def later(*values: Any) -> Any:
    """Parameters that are compiled where the long tests are asked for: seconds each, of what others show in part."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What the launches in a test would have run: they compile and stop there."""
    monkeypatch.setattr(overlap, "_is_able", lambda device: True)
    return compile_only(monkeypatch, tmp_path, HOPPER)


def compile_only(patch: pytest.MonkeyPatch, cache: Path, target: GPUTarget) -> list[Any]:
    """From here on launches compile for the target and add to the list what they would have run."""
    found: list[Any] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "launch_pdl") if name in kwargs}
        arguments = inspect.signature(self.fn).bind(*args, **kwargs).arguments
        types, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.params):
            value = arguments[parameter.name]
            if parameter.is_constexpr:
                types[parameter.name], constants[(i,)] = "constexpr", value
            elif isinstance(value, TensorDescriptor):
                types[parameter.name] = f"tensordesc<{TYPES[value.base.dtype][1:]}{value.block_shape}>"
            elif isinstance(value, torch.Tensor):
                types[parameter.name], attributes[(i,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
            else:
                types[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        source = ASTSource(self, types, constants, attributes)
        found.append(triton.compile(source, target=target, options=options))

    patch.setattr(JITFunction, "run", run)
    patch.setenv("TRITON_CACHE_DIR", str(cache))
    return found


def test_cards_that_the_kernels_are_not_written_for_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    why = kernels.why_unusable.__wrapped__("cuda")
    assert why == "the Triton kernels want compute capability 8.0, this card has 7.5"


def assembler_report(kernel: Any, folder: Path) -> str:
    """What ptxas says of registers, spills and what it could not do."""
    (folder / "kernel.ptx").write_text(kernel.asm["ptx"])
    command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", folder / "kernel.ptx", "-o", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def pages(dim: int) -> tuple[torch.Tensor, ...]:
    """(queries of 64 tokens, keys, values, query_start, context_lens, block_tables): 4 heads over 2."""
    cache = torch.zeros(8, 16, 2, dim, dtype=BF16)
    lens = torch.tensor([64], dtype=torch.int32)
    start = torch.tensor([0, 64], dtype=torch.int32)
    return torch.zeros(64, 4, dim, dtype=BF16), cache, cache, start, lens, torch.zeros(1, 512, dtype=torch.int32)


@pytest.mark.parametrize("dim", [128, later(256)])
def test_paged_prefill(dim: int, compiled: list[Any]) -> None:
    q, *rest = pages(dim)
    paged_prefill.paged_prefill(q, *rest, 1.0, out=torch.empty_like(q), processors=132)
    assert [kernel.metadata.name for kernel in compiled] == ["_paged_prefill", "_merge"]
    assert "wgmma" in compiled[0].asm["ptx"]  # Hopper's own matrix instruction
    assert compiled[0].metadata.shared <= HOPPER_SHARED_BYTES
    assert all(kernel.metadata.launch_pdl for kernel in compiled)  # of few tokens


@pytest.mark.parametrize("dim", [later(64), 128])  # own_keys.pays() takes 128
@pytest.mark.parametrize("processors", [1, 132], ids=["whole", "split"])
def test_paged_prefill_with_a_chunk_s_own_keys(dim: int, processors: int, compiled: list[Any], tmp_path: Path) -> None:
    _, *rest = pages(dim)
    qkv = torch.zeros(64, 8 * dim, dtype=BF16)
    q, own = qkv.view(64, 8, dim)[:, :4], OwnKeys.of(qkv, 4, 2)
    out = torch.empty(q.shape, dtype=BF16)
    paged_prefill.paged_prefill(q, *rest, 1.0, out=out, own=own, processors=processors)
    kernel, report = compiled[0], assembler_report(compiled[0], tmp_path)
    assert kernel.metadata.shared <= HOPPER_SHARED_BYTES
    assert "cp.async.bulk.tensor.2d" in kernel.asm["ptx"] and "wgmma" in kernel.asm["ptx"]
    assert " 0 bytes spill stores" in report
    assert not re.search(r"C751[0-5]", report)  # matrix products that wait for each other


@pytest.mark.parametrize(("dim", "splits"), [(128, 32), (256, 1), later(128, 1), later(256, 32)])
def test_paged_decode(dim: int, splits: int, compiled: list[Any]) -> None:
    q, keys, values, _, lens, tables = pages(dim)
    arrived = torch.zeros(2, dtype=torch.int32)
    split = paged_decode.SplitWalk(Partials.empty(1, 4, splits, dim, CPU), arrived) if splits > 1 else None
    options = {"out": torch.empty_like(q[:1]), "split": split}
    paged_decode.paged_decode(q[:1], keys, values, lens, tables, 1.0, **options)
    qkv, angle, slots = torch.zeros(1, 8 * dim, dtype=BF16), q[:1, 0], torch.zeros(1, dtype=torch.int64)
    rotation = Rotation(angle, angle, slots, (angle[0], angle[0], 1e-6))
    paged_decode.decode_qkv(qkv, rotation, keys, values, lens, tables, 1.0, **options)
    assert [kernel.metadata.name for kernel in compiled] == ["_paged_decode", "_paged_decode"]
    for kernel in compiled:
        assert "cp.async" in kernel.asm["ptx"]  # keys arrive while others are multiplied
        assert kernel.metadata.shared <= HOPPER_SHARED_BYTES
    # The new key is written, all threads wait, and only then keys are read.
    lines = compiled[1].asm["ptx"].splitlines()
    written = next(i for i, line in enumerate(lines) if "st.global" in line)
    read = next(i for i, line in enumerate(lines) if "cp.async" in line)
    assert any("bar.sync" in line for line in lines[written:read])


def share_a_prefix(dim: int) -> None:
    """Launch what reads a prefix of 48 sequences, and then what reads the rest of each."""
    heads, kv_heads, decodes = 16, 8, 48
    cache = torch.zeros(8, 32, kv_heads, dim, dtype=BF16)
    lens, tables = torch.zeros(decodes, dtype=torch.int32), torch.zeros(decodes, 64, dtype=torch.int32)
    members = torch.zeros(4, shared_prefix.sequences_per_tile(heads // kv_heads), dtype=torch.int32)
    shared = SharedPrefixes(members, lens[:4], lens)
    prefixes = shared_prefix.Prefixes.of(shared, heads, kv_heads, dim, 132)
    angle, slots = torch.zeros(decodes, dim, dtype=BF16), torch.zeros(decodes, dtype=torch.int64)
    rotation = Rotation(angle, angle, slots, (angle[0], angle[0], 1e-6))
    qkv, out = torch.zeros(decodes, 32 * dim, dtype=BF16), torch.zeros(decodes, heads, dim, dtype=BF16)
    paged_decode.decode_qkv(qkv, rotation, cache, cache, lens, tables, 1.0, out=out, prefixes=prefixes)


@pytest.mark.parametrize("dim", [128, later(256)])
def test_a_shared_prefix_is_read_beside_the_rest(dim: int, compiled: list[Any], tmp_path: Path) -> None:
    share_a_prefix(dim)
    prefix, rest = compiled
    assert [kernel.metadata.name for kernel in compiled] == ["_attend_prefixes", "_paged_decode"]
    for kernel in compiled:
        assert kernel.metadata.launch_pdl and kernel.metadata.shared <= HOPPER_SHARED_BYTES
        assert "cp.async" in kernel.asm["ptx"]
        assert " 0 bytes spill stores" in assembler_report(kernel, tmp_path) or dim > 128
    # The first calls after its wait, so that the second may read without one what was written before the first; that
    # one waits behind its walk.
    wait, call = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
    assert prefix.asm["ptx"].index(wait) < prefix.asm["ptx"].index(call)
    assert rest.asm["ptx"].index(call) < rest.asm["ptx"].rindex("mma.sync") < rest.asm["ptx"].index(wait)


@pytest.mark.parametrize("at_once", [132, 2], ids=["a row each", "row after row"])
def test_a_sum_over_ranks_tells_the_others_once_all_before_it_has_ended_and_reads_once_all_have_told(
    at_once: int, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sum_norm, "_at_once", lambda device, warps: at_once)
    table, counts = torch.zeros(2, dtype=torch.int64), torch.zeros(64, dtype=torch.int32)
    ranks = sum_norm.Ranks(1, table, table, counts, counts)
    x, weight = torch.zeros(4, 1024, dtype=BF16), torch.ones(1024, dtype=BF16)
    sum_norm.sum_norm(ranks, 4, Norm(weight, 1e-6, x))
    (kernel,) = compiled
    assert kernel.metadata.launch_pdl
    ptx = kernel.asm["ptx"]
    waited = ptx.index("griddepcontrol.wait")
    told, heard = ptx.index("atom.global.sys.release.exch"), ptx.index("ld.global.sys.acquire")
    read = ptx.index("ld.global.cg.v4.b32")  # eight elements at once
    assert waited < told < heard < ptx.rindex("bar.sync", heard, read) < read
    assert "ld.global" not in ptx[waited:told]  # the addresses are known by then


def test_the_fused_elementwise_kernels(compiled: list[Any]) -> None:
    keys = pages(128)[1]
    qkv, angle, weight = torch.zeros(64, 8 * 128, dtype=BF16), torch.zeros(64, 128, dtype=BF16), torch.ones(128)
    slots = torch.zeros(64, dtype=torch.int64)
    for norms in (None, (weight.to(BF16), weight.to(BF16), 1e-6)):
        for in_place in (False, True):
            rotation = Rotation(angle, angle, slots, norms)
            rope_cache.rope_cache(qkv, rotation, keys, keys, num_heads=4, in_place=in_place)
    rmsnorm.add_rmsnorm(angle, angle, weight.to(BF16), 1e-6)
    rmsnorm.rmsnorm(angle, weight.to(BF16), 1e-6)
    silu_mul.silu_mul(qkv)
    assert len(compiled) == 7


# Of a decoder layer of Qwen3-0.6B: rows and columns of W, whether a norm is before it, whether it ends in SwiGLU.
PRODUCTS = [(4096, 1024, True, False), (1024, 2048, False, False), (6144, 1024, True, True), (1024, 3072, False, False)]


@pytest.mark.parametrize(
    ("product", "rows"),
    [
        (product, rows) if (i + k) % 2 == 0 else later(product, rows)
        for i, product in enumerate(PRODUCTS)
        for k, rows in enumerate((1, 3, 32, 64, 128, 256))
    ],
    ids=str,
)
def test_products_of_few_rows(product: tuple[int, int, bool, bool], rows: int, compiled: list[Any]) -> None:
    outputs, columns, normed, gated = product
    x, weight = torch.zeros(rows, columns, dtype=BF16), torch.zeros(outputs, columns, dtype=BF16)
    norm = Norm(weight[0], 1e-6, x) if normed and rows <= gemv.MAX_ROWS else None
    FewRows(weight, None, gated=gated)(x, norm)
    (kernel,) = compiled
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.launch_pdl and kernel.metadata.shared <= HOPPER_SHARED_BYTES
    # What is read of W before the kernel before has finished.
    early = ptx[: ptx.index("griddepcontrol.wait")]
    if rows <= gemv.MAX_ROWS:
        assert "ld.global.v4" in early
    elif skinny._tile(rows, outputs, columns).is_held:
        assert early.count("ld.global") >= 16  # all of its share of W
        assert "cp.async" not in ptx
    else:
        assert "prefetch.global.L2" in early
        (loop,) = re.findall(r"^    \S+ = scf\.for .*?^    \}", kernel.asm["ttgir"], re.M | re.S)
        assert "tt.load" not in loop and loop.count("ttg.async_copy_global_to_local") == 2
        # A turn waits for its own copies, of x and of W, and leaves those of the next one or two under way.
        under_way = 2 * (skinny._tile(rows, outputs, columns).stages - 2)
        assert re.search(rf"cp\.async\.wait_group\s+{under_way};", ptx)
        assert rows < 64 or "wgmma" in ptx


@pytest.mark.parametrize("rows", [later(3), later(64), 256])
def test_products_that_begin_and_end_norms_fit_the_registers(rows: int, compiled: list[Any], tmp_path: Path) -> None:
    hidden, wide = torch.zeros(rows, 1024, dtype=BF16), torch.zeros(rows, 3072, dtype=BF16)
    added = FewRows(torch.zeros(1024, 3072, dtype=BF16), None, gated=False).add(wide, Norm(hidden[0], 1e-6, hidden))
    assert added.squares.shape == (32, rows)
    for outputs, gated in ((4096, False), (6144, True)):
        FewRows(torch.zeros(outputs, 1024, dtype=BF16), None, gated=gated)(added)
    for kernel in compiled:
        assert kernel.metadata.launch_pdl and kernel.metadata.shared <= HOPPER_SHARED_BYTES
        assert " 0 bytes spill stores" in assembler_report(kernel, tmp_path)


@pytest.mark.parametrize("dim", [128, later(256)])
def test_attention_fits_the_shared_memory_of_smaller_cards(
    dim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled = compile_only(monkeypatch, tmp_path, ADA)
    q, keys, values, start, lens, tables = pages(dim)
    paged_prefill.paged_prefill(q, keys, values, start, lens, tables, 1.0, out=torch.empty_like(q))
    paged_decode.paged_decode(q[:1], keys, values, lens, tables, 1.0, out=torch.empty_like(q[:1]))
    share_a_prefix(dim)
    assert len(compiled) == 4 and all(kernel.metadata.shared <= ADA_SHARED_BYTES for kernel in compiled)


@pytest.mark.parametrize("rows", [64, 256])  # of the largest tiles
def test_products_fit_the_shared_memory_of_smaller_cards(
    rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled = compile_only(monkeypatch, tmp_path, ADA)
    for outputs, columns, _, gated in PRODUCTS[2:]:
        x, weight = torch.zeros(rows, columns, dtype=BF16), torch.zeros(outputs, columns, dtype=BF16)
        FewRows(weight, None, gated=gated)(x)
    assert len(compiled) == 2 and all(kernel.metadata.shared <= ADA_SHARED_BYTES for kernel in compiled)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_kernel_calls_for_the_next_one_after_its_wait(rows: int, compiled: list[Any]) -> None:
    """What others read before their waits relies on it."""
    FewRows(torch.zeros(512, 1024, dtype=BF16), None, gated=False)(torch.zeros(rows, 1024, dtype=BF16))
    ptx = compiled[0].asm["ptx"]
    assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")


def test_step_rows(compiled: list[Any]) -> None:
    words, halves, tables = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32), pages(64)[5]
    step_rows.step_rows(
        tables, words, halves, halves, halves, words, block_size=16, input_ids=words, step_tables=tables
    )
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("adjusts", "dtype"),
    [(True, BF16), (False, torch.float32), later(True, torch.float32), later(False, BF16)],
    ids=str,
)
def test_sampling(adjusts: bool, dtype: torch.dtype, compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncation, "_num_programs", lambda device: 128)
    words, vocab_size = torch.zeros(2, dtype=torch.int64), 151_936
    settings = RowSettings.zeros(3, vocab_size, CPU)
    logits, token_hash = torch.zeros(2, vocab_size, dtype=dtype), torch.zeros(vocab_size, dtype=torch.int32)
    sampling.sample(logits, settings, words, words, token_hash, input_ids=words if adjusts else None)
    assert [kernel.metadata.name for kernel in compiled] == ["_race", "_final", "_truncated"]
    # Both logarithms of the noise by the card's own instruction, in few lines: they are what the draw's time is.
    assert "lg2.approx.ftz" in compiled[0].asm["ptx"] and "__nv_log" not in compiled[0].asm["llir"]
