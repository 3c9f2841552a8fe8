"""Steps in C against transformers in fp32, on tiny models whose weights are rounded to 4 bits on both sides."""

from __future__ import annotations

import platform
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import SamplingParams
from engine.sampler import BAD_TOKEN, Sampler, SamplingRow
from models import loader
from models.int4 import GROUP, Int4Matrix
from models.loader import load_model, read_config
from models.native import library
from tests.models.paged import PagedRunner

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
GENERIC = {"x86_64": ("-march=x86-64-v3", "-march=x86-64"), "aarch64": ("-march=armv8-a",)}


def in_4_bits(weight: torch.Tensor) -> Int4Matrix:
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.min(-1).values, groups.max(-1).values
    scale = (high - low) / 15
    q = ((groups - low.unsqueeze(-1)) / scale.unsqueeze(-1)).round().clamp(0, 15).to(torch.uint8)
    return Int4Matrix(q.flatten(1), scale, low)


class Pair:
    """transformers' model of a folder with its layers' weights rounded to 4 bits, and ours of the same."""

    def __init__(self, folder: Path, dense: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.weights: dict[str, Any] = {}
        for name, weight in self.theirs.state_dict().items():
            packed = name.endswith("proj.weight") and not any(part in name for part in dense)
            self.weights[name] = in_4_bits(weight) if packed else weight.clone()
            if packed:
                weight.copy_(self.weights[name].dequantize())
        if self.theirs.config.tie_word_embeddings:
            del self.weights["lm_head.weight"]

    def ours(self, dtype: torch.dtype = torch.float32, native: bool = True) -> Any:
        weights = [(name, lambda weight=weight: weight, 1.0) for name, weight in self.weights.items()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loader, "_folder_weights", lambda folder, in_part: iter(weights))
            return load_model(self.folder, read_config(self.folder), dtype=dtype, native=native)

    def logits(self, ids: list[int]) -> torch.Tensor:
        """transformers', after each of the ids."""
        with torch.inference_mode():
            return self.theirs(torch.tensor([ids])).logits[0]


@pytest.fixture(autouse=True)
def compiled() -> None:
    try:
        library.load(False)
    except library.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest, make_tiny_model: Callable[..., Path]) -> Pair:
    return Pair(make_tiny_model(request.param, seed=3, **SHAPE))


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Both float32 of the same computation in another order."""
    error = (got - expected).abs().max() / expected.abs().max()
    assert error < 5e-5, error


def sequences(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(512) for _ in range(rng.randrange(2, 90))] for _ in range(count)]


def decoded(model: Any, prompts: list[list[int]], **pool: Any) -> tuple[list[torch.Tensor], PagedRunner]:
    """Each prompt's logits after its last id, which all decode together, and the pool that they have filled."""
    pages = PagedRunner(model, dtype=model.lm_head.weight.dtype, **({"scatter": True} | pool))
    blocks = [pages.reserve(len(prompt)) for prompt in prompts]
    for prompt, taken in zip(prompts, blocks, strict=True):
        pages.step([(prompt[:-1], 0, taken)])
    steps = [(prompt[-1:], len(prompt) - 1, taken) for prompt, taken in zip(prompts, blocks, strict=True)]
    return [logits[-1] for logits in pages.step(steps)], pages


class Counted:
    """How many steps and logits a decoder has made."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[int] = []
        run = model.decoder._run
        monkeypatch.setattr(model.decoder, "_run", lambda call, step: (self.steps.append(step.rows), run(call, step)))


@pytest.mark.parametrize("size", [1, 16, 24])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 13, 40])
def test_decodes_have_the_logits_of_transformers(
    pair: Pair, rows: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pair.ours()
    counted = Counted(model, monkeypatch)
    prompts = sequences(rows, seed=rows)
    got, _ = decoded(model, prompts, block_size=size, num_blocks=90 * rows)
    assert rows in counted.steps
    for logits, prompt in zip(got, prompts, strict=True):
        close(logits, pair.logits(prompt)[-1])


def test_greedy_tokens_are_those_of_transformers(pair: Pair) -> None:
    """So the keys and values that decodes have written are right, too."""
    prompts = sequences(5, seed=1)
    got = PagedRunner(pair.ours(), scatter=True).greedy(prompts, 40)
    for prompt, tokens in zip(prompts, got, strict=True):
        logits = pair.logits(prompt + tokens)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert (logits.max(1).values - chosen < 1e-4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_beside_others(pair: Pair, dtype: torch.dtype) -> None:
    model, prompts = pair.ours(dtype), sequences(13, seed=2)
    together, _ = decoded(model, prompts)
    for logits, prompt in zip(together, prompts, strict=True):
        assert torch.equal(logits, decoded(model, [prompt], seed=5)[0][0])


def test_bfloat16_is_as_near_to_transformers_as_pytorch_s_own_products(pair: Pair) -> None:
    prompts = sequences(12, seed=3)
    errors = []
    for native in (True, False):
        got, _ = decoded(pair.ours(torch.bfloat16, native), prompts)
        distance = [(a - pair.logits(p)[-1]).square().mean() for a, p in zip(got, prompts, strict=True)]
        errors.append(torch.stack(distance).mean().sqrt().item())
    assert errors[0] < 1.2 * errors[1], errors


def test_what_is_not_finite_stays_with_its_row(pair: Pair) -> None:
    model, prompts = pair.ours(), sequences(5, seed=4)
    clean, _ = decoded(model, prompts)
    pages = PagedRunner(model)
    blocks = [pages.reserve(len(prompt)) for prompt in prompts]
    for prompt, taken in zip(prompts, blocks, strict=True):
        pages.step([(prompt[:-1], 0, taken)])
    pages.kv[1, 0, blocks[2]] = float("nan")
    steps = [(prompt[-1:], len(prompt) - 1, taken) for prompt, taken in zip(prompts, blocks, strict=True)]
    for i, (logits, expected) in enumerate(zip(pages.step(steps), clean, strict=True)):
        assert torch.equal(logits[-1], expected) if i != 2 else logits.isnan().all()


def test_the_end_of_a_prompt_beside_decodes_has_the_logits_of_transformers(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five tokens behind a prefix, three of another prompt with none, and two decodes in one step."""
    model = pair.ours()
    counted = Counted(model, monkeypatch)
    pages, prompts = PagedRunner(model, scatter=True), [*sequences(3, seed=9), [7, 8, 9]]
    blocks = [pages.reserve(len(prompt)) for prompt in prompts]
    cached = [len(prompts[0]) - 1, len(prompts[1]) - 1, len(prompts[2]) - 5, 0]
    for prompt, length, taken in zip(prompts[:3], cached, blocks, strict=False):
        pages.step([(prompt[:length], 0, taken)])
    got = pages.step([(p[n:], n, taken) for p, n, taken in zip(prompts, cached, blocks, strict=True)])
    assert counted.steps[-2:] == [10, 10]
    for logits, prompt, length in zip(got, prompts, cached, strict=True):
        close(logits, pair.logits(prompt)[length:])
    pages.last_only = True
    last = pages.step([(p[n:], n, taken) for p, n, taken in zip(prompts, cached, blocks, strict=True)])
    assert all(torch.equal(a[0], b[-1]) for a, b in zip(last, got, strict=True))


def test_prompts_and_steps_of_many_go_to_pytorch(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair.ours()
    counted = Counted(model, monkeypatch)
    monkeypatch.setattr(model.decoder, "max_rows", 3)
    prompts = sequences(4, seed=6)
    got, _ = decoded(model, prompts)
    assert all(rows <= 3 for rows in counted.steps)
    for logits, prompt in zip(got, prompts, strict=True):
        close(logits, pair.logits(prompt)[-1])


@pytest.mark.parametrize("shape", [{"num_key_value_heads": 4}, {"num_attention_heads": 8, "num_key_value_heads": 1}])
def test_any_number_of_heads_may_share_keys(shape: dict, make_tiny_model: Callable[..., Path]) -> None:
    pair, prompts = Pair(make_tiny_model("llama", seed=7, **SHAPE, **shape)), sequences(3, seed=7)
    for logits, prompt in zip(decoded(pair.ours(), prompts)[0], prompts, strict=True):
        close(logits, pair.logits(prompt)[-1])


@pytest.mark.parametrize("flag", GENERIC.get(platform.machine(), ()))
def test_cpus_with_shorter_vectors(flag: str, pair: Pair, fresh_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = tuple(flag if f == "-march=native" else f for f in library._FLAGS)
    monkeypatch.setattr(library, "_FLAGS", flags)
    if flag == "-march=x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    prompts = sequences(9, seed=8)
    for logits, prompt in zip(decoded(pair.ours(), prompts)[0], prompts, strict=True):
        close(logits, pair.logits(prompt)[-1])
    for logits, prompt in zip(decoded(pair.ours(torch.bfloat16), prompts)[0], prompts, strict=True):
        torch.testing.assert_close(logits, pair.logits(prompt)[-1], rtol=0.05, atol=1.0)


@pytest.mark.parametrize("vocab", [5, 16, 50, 1003, 49152])
def test_draws_are_the_sampler_s_own(vocab: int, pair: Pair) -> None:
    """Temperatures that make one token all but sure and all alike, and rows that share a step with truncated ones."""
    torch.manual_seed(vocab)
    plain, native = Sampler(vocab), Sampler(vocab, draw_whole=pair.ours().decoder.draw)
    for step in range(30):
        settings = [{"temperature": t} for t in (0.01, 0.6, 1.0, 30.0)] + [{"top_p": 0.9}, {"temperature": 0.0}]
        rows = [SamplingRow(i, SamplingParams(**s), 7 * i, step, (), ()) for i, s in enumerate(settings)]
        logits = torch.randn(len(rows), vocab) * 5
        logits[1, step % vocab] = -torch.inf
        logits[2, step % vocab] = logits[2].max()  # a tie
        logits[3] *= step % 3 > 0
        assert torch.equal(native(logits, native.prepare(rows)), plain(logits, plain.prepare(rows)))


def test_a_row_of_broken_logits_draws_none_and_the_others_do(pair: Pair) -> None:
    native = Sampler(50, draw_whole=pair.ours().decoder.draw)
    logits = torch.randn(4, 50)
    logits[0, 3], logits[1, 4], logits[2] = torch.nan, torch.inf, -torch.inf
    tokens = native(logits, native.prepare([SamplingRow(i, SamplingParams(), i, 0, (), ()) for i in range(4)]))
    assert tokens[:3].tolist() == [BAD_TOKEN] * 3 and 0 <= tokens[3] < 50


# ----------------------------------------------------------------------------------- where it cannot be


@pytest.fixture
def fresh_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is loaded or compiled yet; the folder where it will be."""
    monkeypatch.setenv("PAGETURN_HOME", str(tmp_path / "home"))
    library.load.cache_clear()
    yield tmp_path / "home" / "native"
    library.load.cache_clear()


def test_it_is_compiled_once_and_kept(fresh_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.load(False)
    (kept,) = fresh_library.iterdir()
    library.load.cache_clear()
    ran: list[Any] = []
    monkeypatch.setattr(library.subprocess, "run", lambda *args, **more: ran.append(args))
    library.load(False)
    assert not ran and list(fresh_library.iterdir()) == [kept]


def test_it_need_not_be_kept(fresh_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    fresh_library.parent.write_text("a file, where the folder would be")
    assert library.load(False).decode_layers is not None
    assert not any((tmp_path / "scratch").iterdir())


def test_without_a_home_it_is_compiled_all_the_same(fresh_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(library, "cache_dir", homeless)
    assert library.load(False).decode_layers is not None


def test_with_nowhere_to_compile_that_is_the_reason(fresh_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.tempfile, "tempdir", "/no/such/folder")
    fresh_library.parent.write_text("a file, where the folder would be")
    with pytest.raises(library.Unavailable, match=r"nowhere to compile: .*/no/such/folder"):
        library.load(False)


def test_a_damaged_one_is_compiled_anew(fresh_library: Path) -> None:
    library.load(False)
    (kept,) = fresh_library.iterdir()
    whole = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(b"")
    library.load.cache_clear()
    assert library.load(False).decode_layers is not None
    assert len(kept.read_bytes()) == len(whole) and list(fresh_library.iterdir()) == [kept]


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        (None, "no C compiler: none of"),
        ("/no/such/cc", "/no/such/cc cannot be used"),
        ("false", "false fails"),
        ("gcc '", 'CC="gcc \'" cannot be read: No closing quotation'),
        (" ", "CC=' ' names no compiler"),
    ],
)
def test_without_a_compiler_pytorch_decodes_and_the_reason_is_kept(
    compiler: str | None, why: str, pair: Pair, fresh_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    model = pair.ours()
    assert model.decoder is None and model.why_no_decoder.startswith(why)
    prompt = sequences(1)[0]
    close(decoded(model, [prompt])[0][0], pair.logits(prompt)[-1])
    assert not fresh_library.exists() or not any(fresh_library.iterdir())


def test_a_compiler_s_first_word_is_the_reason(fresh_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = tmp_path / "decode.c"
    broken.write_text("int f(void) {\n    return x;\n}\n")  # the compiler says first which function it is in
    monkeypatch.setattr(library, "_SOURCE", broken)
    with pytest.raises(library.Unavailable, match=r"fails with code 1: .*decode.c:2:12: error"):
        library.load(True)


@pytest.mark.parametrize(
    ("shape", "dense", "dtype", "why"),
    [
        (SHAPE, ("layers.1.mlp.down_proj",), torch.float32, "not all of this model's are"),
        (SHAPE | {"attention_bias": True}, (), torch.float32, "without a bias"),
        (SHAPE | {"head_dim": 16}, (), torch.float32, "heads of 16"),
        (SHAPE | {"intermediate_size": 96}, (), torch.float32, "it does not take a matrix of 128 x 96"),
        (SHAPE, (), torch.float16, "not in float16"),
    ],
)
def test_what_it_does_not_take_is_left_to_pytorch_with_the_reason(
    shape: dict, dense: tuple[str, ...], dtype: torch.dtype, why: str, make_tiny_model: Callable[..., Path]
) -> None:
    model = Pair(make_tiny_model("llama", **shape), dense).ours(dtype)
    assert model.decoder is None and why in model.why_no_decoder


def test_memory_that_is_short_is_an_error_of_the_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair.ours()
    monkeypatch.setattr(model.decoder, "_layers", lambda *args: -1)
    with pytest.raises(MemoryError, match=r"no room for the products of \d+ tokens"):
        decoded(model, sequences(1))
