"""The kernels of the draw against the sampler on a CPU, transformers' processors and the draw's definition.

Collected as kernel_cases.py is: natively by test_kernels.py, in the interpreter by test_kernels_interpreted.py.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.graph_sampling import GraphSampling
from engine.sampler import Sampler, SamplingRow
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.kernels import sampling

ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
TYPES = [torch.bfloat16, torch.float16, torch.float32] if ON_CARD else [torch.bfloat16, torch.float32]
SEEDS = range(40) if ON_CARD else range(20, 40)  # which draw each of the tokens that are kept
VOCABULARIES = [7, 1024, 5000, 151_936] if ON_CARD else [7, 1024, 5000]
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9},
    {"top_k": 3, "temperature": 3.0}, {"top_k": 1}, {"top_p": 1e-6}, {"top_p": 0.999, "temperature": 0.3},
    {"top_k": 900, "top_p": 0.95, "min_p": 0.01, "temperature": 0.6}, {"top_k": 2, "top_p": 0.5}, {"top_k": 7},
]  # fmt: skip


def sequence(params: SamplingParams, seed: int, prompt: list[int], *, stop_ids: tuple[int, ...] = ()) -> Sequence:
    return Sequence(0, prompt, params, seed=seed, max_tokens=params.max_tokens, stop_ids=frozenset(stop_ids))


def introduce(graph: GraphSampling, row: int, seq: Sequence) -> None:
    graph.introduce(row, seq)
    graph.settings.words[row] = torch.from_numpy(graph.words[row])


class Draw:
    """Rows of a GraphSampling for these sequences, in another order than the batch's, and their draw."""

    def __init__(self, sequences: list[Sequence], vocab_size: int) -> None:
        self.sequences = sequences
        self.rows = np.arange(len(sequences))[::-1] + 1
        self.graph = GraphSampling(len(sequences) + 1, vocab_size, DEVICE)
        self.sampler = Sampler(vocab_size, DEVICE)
        for row, seq in zip(self.rows.tolist(), sequences, strict=True):
            introduce(self.graph, row, seq)

    def __call__(self, logits: torch.Tensor, function: Any = sampling.sample) -> list[int]:
        """The next token of each, of which the host has not told the device the last one."""
        positions = np.array([len(seq.token_ids) for seq in self.sequences])
        items: list[Any] = [SimpleNamespace(seq=seq) for seq in self.sequences]
        assert self.graph.prepare(items, self.rows, positions)
        inputs = torch.tensor([seq.token_ids[-1] for seq in self.sequences], device=DEVICE)
        return function(
            logits.to(DEVICE), self.graph.settings, torch.from_numpy(self.rows.copy()).to(DEVICE),
            torch.from_numpy(positions).to(DEVICE), self.sampler._noise.token_hash, input_ids=inputs,
        ).tolist()  # fmt: skip


def expected_tokens(sequences: list[Sequence], logits: torch.Tensor) -> list[int]:
    """By the sampler on a CPU, without kernels."""
    sampler = Sampler(logits.shape[1])
    sampler._kernel = None  # the interpreter would let it have one
    rows = []
    for i, seq in enumerate(sequences):
        count = seq.num_prompt_tokens
        banned = seq.stop_ids if seq.num_output_tokens < seq.params.min_tokens else ()
        rows.append(
            SamplingRow(
                i, seq.params, seq.seed, len(seq.token_ids), seq.token_ids[:count], seq.token_ids[count:], banned
            )
        )
    return sampler(logits.float(), sampler.prepare(rows)).tolist()


def mixed_sequences(count: int, vocab_size: int) -> list[Sequence]:
    rng = random.Random(count)
    return [
        sequence(
            SamplingParams(**MIXED[i % len(MIXED)]), rng.randrange(2**63), [rng.randrange(vocab_size)] * (1 + 37 * i)
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_draws_of_mixed_settings_are_those_of_the_sampler_on_a_cpu(vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(13)
    count = 208 if ON_CARD else len(MIXED)
    logits = (torch.randn(count, vocab_size) * 4).to(dtype)
    logits[0] = logits[0].round()
    logits[2, ::2] = logits[2, 0]
    sequences = mixed_sequences(count, vocab_size)
    expected = expected_tokens(sequences, logits)
    assert Draw(sequences, vocab_size)(logits) == expected
    assert Draw(sequences, vocab_size)(logits, sampling.reference) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 130, 256] if ON_CARD else [1, 2])
def test_any_number_of_truncated_rows_is_shared_out_among_the_programs(count: int) -> None:
    """On a card teams have 64 programs for one row, and one for each of many."""
    torch.manual_seed(count)
    vocab_size = 30_011 if ON_CARD else 3001
    logits = torch.randn(count, vocab_size).mul_(3).bfloat16()
    params = SamplingParams(top_k=50, top_p=0.9)
    sequences = [sequence(params, 1000 + i, [1, 2, 3]) for i in range(count)]
    for _ in range(3):
        expected = expected_tokens(sequences, logits)
        assert Draw(sequences, vocab_size)(logits) == expected
        for seq in sequences:
            seq.token_ids.append(0)


@pytest.mark.parametrize("settings", [{"top_k": 6}, {"top_p": 0.52}, {"top_k": 12, "top_p": 0.52}], ids=str)
def test_of_tied_logits_the_lowest_ids_are_kept(settings: dict[str, Any]) -> None:
    """Twelve equal logits among many -inf, at both ends and around the borders of blocks; zeros of either sign tie."""
    logits = torch.full((1, 2500), -torch.inf)
    tied = [0, 1, 5, 1022, 1023, 1024, 1025, 2047, 2048, 2300, 2498, 2499]
    logits[0, tied] = 0.0
    logits[0, tied[::2]] = -0.0
    kept = set(tied[: 7 if settings.get("top_p") else 6])
    params = SamplingParams(**settings)
    logits = logits.repeat(len(SEEDS), 1)
    sequences = [sequence(params, seed, [1]) for seed in SEEDS]
    tokens = Draw(sequences, 2500)(logits)
    assert set(tokens) == kept
    assert tokens == expected_tokens(sequences, logits)


@pytest.mark.parametrize("level", [0.0, -3.5, 88.0, -1e30], ids=str)
def test_a_flat_distribution_is_cut_to_its_first_ids(level: float) -> None:
    logits = torch.full((len(SEEDS), 1500), level)
    sequences = [sequence(SamplingParams(top_p=0.004), seed, [1]) for seed in SEEDS]
    assert set(Draw(sequences, 1500)(logits)) == set(range(6))


def test_a_row_of_unusable_logits_has_no_token_and_its_neighbours_do() -> None:
    logits = torch.randn(7, 3000)
    logits[1, 2500] = torch.nan
    logits[2, 7] = torch.inf
    logits[3] = -torch.inf
    logits[4, :2990] = -torch.inf  # one whole part and most of the next: still a usable row
    choices: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.2}]
    for settings in choices:
        sequences = [sequence(SamplingParams(**settings), 1, [5]) for _ in range(7)]
        sequences[5].params = SamplingParams()
        tokens = Draw(sequences, 3000)(logits)
        assert [token == sampling.BAD_TOKEN for token in tokens] == [False, True, True, True, False, False, False]
        assert tokens[4] >= 2990


def test_truncated_tokens_come_as_often_as_their_probability_says() -> None:
    """Chi-square over 4000 seeds, of the tokens that top_k 12 and top_p 0.9 keep. Too slow for the interpreter."""
    count = 4000
    logits = torch.linspace(3.0, -3.0, 40)[torch.randperm(40, generator=torch.Generator().manual_seed(5))]
    ranked = logits.softmax(0).sort(descending=True)
    within = ranked.values[:12] / ranked.values[:12].sum()
    size = int((within.cumsum(0) - within < 0.9).sum())
    kept, shares = ranked.indices[:size], within[:size] / within[:size].sum()
    sequences = [sequence(SamplingParams(top_k=12, top_p=0.9), seed, [1]) for seed in range(count)]
    draw = Draw(sequences, 40)
    tokens = draw(logits.repeat(count, 1), sampling.sample if ON_CARD else sampling.reference)
    found = torch.bincount(torch.tensor(tokens), minlength=40)
    assert int(found[kept].sum()) == count
    observed, expected = found[kept].double(), shares.double() * count
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 33.0  # its mean is size - 1, about 8; beyond 33 lie 1 in 10,000


# ---------------------------------------------------------------------- penalties and biases


def test_penalties_over_steps_are_those_of_transformers_and_of_the_openai_api() -> None:
    """Greedy rows, so that the token shows the logits. The repetition penalty is transformers' processor; presence and
    frequency, of which it has none, are subtracted as the OpenAI API defines them."""
    from transformers import RepetitionPenaltyLogitsProcessor

    torch.manual_seed(3)
    vocab_size, rng = 60, random.Random(4)
    values = [(1.3, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, 0.7), (0.7, -0.5, 0.3), (1.8, 0.4, 0.9), (1.0, 0.0, 0.0)]
    sequences = [
        sequence(
            SamplingParams(temperature=0.0, repetition_penalty=r, presence_penalty=p, frequency_penalty=f), 1,
            [rng.randrange(vocab_size) for _ in range(9)],
        )
        for r, p, f in values
    ]  # fmt: skip
    draw = Draw(sequences, vocab_size)
    for step in range(12):
        logits = torch.randn(len(values), vocab_size).bfloat16()
        expected = []
        for row, (repetition, presence, frequency) in enumerate(values):
            seq = sequences[row]
            scores = logits[row : row + 1].float()
            if repetition != 1.0:
                scores = RepetitionPenaltyLogitsProcessor(repetition)(torch.LongTensor([seq.token_ids]), scores)
            counts = torch.bincount(torch.tensor(seq.token_ids[9:], dtype=torch.int64), minlength=vocab_size)
            scores = scores[0] - presence * (counts > 0) - frequency * counts
            expected.append(int(scores.argmax()))
        if step == 7:
            # A step elsewhere has moved on: the device's counts are behind.
            draw.graph._next_position[:] = 0
        assert draw(logits) == expected
        for seq, token in zip(sequences, expected, strict=True):
            seq.token_ids.append(token)


def test_the_device_counts_its_own_input_and_only_once_it_is_output() -> None:
    params = SamplingParams(repetition_penalty=1.1)
    seq = sequence(params, 1, [3, 3, 4])
    draw = Draw([seq], 10)
    counts = draw.graph.settings.counts
    assert counts is not None
    for token in (4, 5, 5):
        draw(torch.randn(1, 10))
        seq.token_ids.append(token)
    row = int(draw.rows[0])
    assert counts[row].tolist() == [0, 0, 0, -(2**15), 1 - 2**15, 1, 0, 0, 0, 0]
    assert not counts[torch.arange(len(counts), device=DEVICE) != row].any()


def test_penalized_biased_and_banned_rows_are_truncated_after_that() -> None:
    torch.manual_seed(8)
    vocab_size, rng = 2100, random.Random(2)
    settings: list[dict[str, Any]] = [
        {"repetition_penalty": 1.4, "top_k": 9}, {"frequency_penalty": 1.1, "top_p": 0.6},
        {"presence_penalty": -0.8, "min_p": 0.05}, {"logit_bias": {5: 7.0, 2099: 8.0, 40: -100.0}, "top_k": 4},
        {"logit_bias": {5: 30.0, 6: 31.0}, "min_tokens": 3, "top_p": 0.9}, {"min_tokens": 2, "temperature": 0.0},
        {"repetition_penalty": 1.1, "top_k": 40, "top_p": 0.9, "logit_bias": {0: 2.0}}, {"top_k": 40},
    ]  # fmt: skip
    for i, chosen in enumerate(settings):
        chosen["seed"] = i
    sequences = [
        sequence(SamplingParams(**chosen), i, [rng.randrange(vocab_size) for _ in range(30)], stop_ids=(6, 7))
        for i, chosen in enumerate(settings)
    ]
    draw, twin = Draw(sequences, vocab_size), Draw(sequences, vocab_size)
    for _ in range(4):
        logits = (torch.randn(len(settings), vocab_size) * 2).bfloat16()
        logits[5, 6] = 50.0
        expected = expected_tokens(sequences, logits)
        assert draw(logits) == expected
        assert twin(logits, sampling.reference) == expected
        for seq, token in zip(sequences, expected, strict=True):
            seq.token_ids.append(token)


def test_what_a_row_does_not_hold_is_left_to_the_host() -> None:
    graph = GraphSampling(2, 500, DEVICE)

    def is_drawn(position: int = 2, stop_ids: tuple[int, ...] = (), **settings: Any) -> bool:
        seq = sequence(SamplingParams(**settings), 1, [1, 2], stop_ids=stop_ids)
        seq.token_ids += [5] * (position - 2)
        introduce(graph, 0, seq)
        return graph.prepare([SimpleNamespace(seq=seq)], np.array([0]), np.array([position]))  # type: ignore[list-item]

    assert is_drawn(top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.2, logit_bias=dict.fromkeys(range(64), 1.0))
    assert not is_drawn(logit_bias=dict.fromkeys(range(65), 1.0))
    assert not is_drawn(repetition_penalty=1.2, max_tokens=40_000)
    assert not is_drawn(logprobs=0)
    many = tuple(range(65))
    assert is_drawn(stop_ids=many[:64], min_tokens=3)
    assert [is_drawn(n, stop_ids=many, min_tokens=3) for n in (2, 4, 5, 6)] == [False, False, True, True]
