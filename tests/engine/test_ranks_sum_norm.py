"""Two ranks whose sums take the norm behind them along: tokens of transformers; and where one rank cannot, none does.

The processes are real, and so is what they tell each other through shared memory; the kernel is interpreted.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import sum_norm_rank
from engine import LLM, SamplingParams, rank_group
from mixed_requests import prompts
from reference import assert_greedy

pytest.importorskip("triton")

SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "kvcache_block_size": 4, "num_kvcache_blocks": 400, "max_num_seqs": 9,
    "max_num_batched_tokens": 64, "tensor_parallel_size": 2,
}  # fmt: skip
SERVED = f"{sum_norm_rank.SERVED} sums with norms"


def generate(
    folder: Path, asked: list[list[int]], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> list[list[int]]:
    monkeypatch.setattr(rank_group, "main", sum_norm_rank.main)
    llm = LLM(folder, **SETTINGS)
    try:
        params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
        return [out.token_ids for out in llm.generate(asked, params, use_tqdm=False)]
    finally:
        llm.exit()


def check(folder: Path, asked: list[list[int]], found: list[list[int]]) -> None:
    from transformers import AutoModelForCausalLM

    assert_greedy(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), asked, found)


@pytest.mark.parametrize("family", ["tiny_qwen3", pytest.param("tiny_llama", marks=pytest.mark.long)])
def test_sums_with_norms_in_small_steps_and_the_librarys_in_large_ones_give_the_tokens_of_transformers(
    family: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, asked = request.getfixturevalue(family), prompts(14)[:8]  # eight decodes are more than MOST_ROWS
    lengths = [3, 3, 8, 8, 8, 8, 8, 8]  # and then six are not
    with caplog.at_level(logging.INFO, "pageturn.engine"):
        found = generate(folder, asked, lengths, monkeypatch)
    check(folder, asked, found)
    assert "sums over ranks: one shot, with the norm behind them" in caplog.text
    assert SERVED in caplog.text


@pytest.mark.parametrize(
    ("fault", "rank", "said"),
    [
        ("WRONG_RANK", 0, "a trial gave a wrong sum"),
        ("WRONG_RANK", 1, "another rank cannot"),
        ("DEAF_RANK", 0, "a trial gave a wrong sum"),
    ],
)
def test_where_a_rank_adds_up_wrongly_or_waits_in_vain_at_the_start_no_rank_uses_it(
    fault: str,
    rank: int,
    said: str,
    tiny_qwen3: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(fault, str(rank))
    with caplog.at_level(logging.INFO, "pageturn.engine"):
        found = generate(tiny_qwen3, prompts(14)[:2], [8, 8], monkeypatch)
    check(tiny_qwen3, prompts(14)[:2], found)
    assert f"sums over ranks: one shot, without norms ({said}" in caplog.text
    assert SERVED not in caplog.text
