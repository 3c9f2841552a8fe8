"""The sampler keeps the right tokens, draws them with the right frequencies, and a seed pins the result."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.noise import TokenNoise
from engine.sampler import BAD_TOKEN, Sampler, SamplingRow
from engine.sampling_params import SamplingParams


def row(params: SamplingParams, request_id=0, seed=0, position=10, prompt=(0,), output=()) -> SamplingRow:
    return SamplingRow(request_id, params, seed, position, list(prompt), list(output))


def sample(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    sampler = Sampler(logits.shape[1])
    return sampler(logits, sampler.prepare(rows)).tolist()


def many(logits: list[float], params: SamplingParams, n: int, *, by: str = "seed", prompt=(0,), output=()) -> list[int]:
    """n draws from one distribution, each with its own seed or its own position."""
    table = torch.tensor(logits, dtype=torch.float32).repeat(n, 1)
    rows = []
    for i in range(n):
        seed, position = (i, 3) if by == "seed" else (7, i)
        rows.append(row(params, i, seed, position, prompt, output))
    return sample(table, rows)


def logits_of(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


# What is kept ----------------------------------------------------------------------------------------------


def kept_tokens(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Token -> probability after the filters, by definition and in float64; equal logits rank by id."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if top_k > 0:
        order = order[:top_k]
    weight = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    total = sum(weight.values())
    kept, mass = [], 0.0
    for i in order:
        if top_p < 1.0 and kept and mass >= top_p * total:
            break
        kept.append(i)
        mass += weight[i]
    kept = [i for i in kept if weight[i] >= min_p]
    total = sum(weight[i] for i in kept)
    return {i: weight[i] / total for i in kept}


def on_an_edge(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether float32 rounding may decide differently from float64: a mass or a ratio within 1e-5 of its limit."""
    everything = kept_tokens(logits, temperature, top_k, 1.0, 0.0)
    masses = np.cumsum(list(everything.values()))
    ratios = np.array(list(everything.values())) / max(everything.values())
    return bool((abs(masses - top_p) < 1e-5).any() or (abs(ratios - min_p) < 1e-5).any())


filters = {
    "temperature": st.floats(0.3, 3.0),
    "top_k": st.integers(0, 12),
    "top_p": st.floats(0.01, 1.0),
    "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0]),
}


@settings(max_examples=150, deadline=None)
@given(logits=st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=1, max_size=10), **filters)
def test_the_filters_keep_what_their_definitions_say(logits, temperature, top_k, top_p, min_p):
    table = np.array(logits)
    assume(not on_an_edge(table, temperature, top_k, top_p, min_p))
    expected = kept_tokens(table, temperature, top_k, top_p, min_p)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = set(many(logits, params, 400))
    assert drawn <= expected.keys()
    assert {i for i, p in expected.items() if p > 0.06} <= drawn  # 400 draws miss such a token once in 5e10


@pytest.mark.parametrize(
    "settings_",
    [
        {"top_p": 0.999},
        {"top_p": 0.01},
        {"top_k": 256},
        {"top_k": 300, "top_p": 0.9},
        {"top_k": 4500, "top_p": 0.5, "min_p": 0.5},
        {"top_k": 5999},
        {"min_p": 0.6},
    ],
)
def test_a_nearly_flat_distribution_with_many_ties_is_cut_where_the_definitions_say(settings_):
    """6,000 tokens of nearly one probability: hundreds or thousands are kept, and the last has equals."""
    values = (torch.arange(6000) % 977 / 977).tolist()
    params = SamplingParams(**settings_)
    expected = kept_tokens(np.array(values, dtype=np.float32), 1.0, params.top_k, params.top_p, params.min_p)
    drawn = many(values, params, 600)
    assert set(drawn) <= expected.keys()
    # As many different ones as 600 draws from so many give, within five standard deviations.
    n = len(expected)
    different = n * (1 - (1 - 1 / n) ** 600)
    assert len(set(drawn)) > 0.9 * different - 5 * math.sqrt(different)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), **filters)
def test_a_truncated_draw_is_the_best_placed_token_of_the_untruncated_race_that_is_kept(seed, **chosen):
    """Truncation never changes how the kept tokens compare, only who takes part."""
    values = torch.randn(60, generator=torch.Generator().manual_seed(seed)) * 2
    assume(not on_an_edge(values.numpy(), **chosen))
    kept = kept_tokens(values.numpy(), **chosen)
    forbidden = torch.tensor([i not in kept for i in range(60)])
    whole = SamplingParams(temperature=chosen["temperature"])
    expected = many(values.masked_fill(forbidden, -math.inf).tolist(), whole, 40)
    assert many(values.tolist(), SamplingParams(**chosen), 40) == expected


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    assert set(many(logits_of(0.1, 0.2, 0.3, 0.4), SamplingParams(top_p=0.6), 500)) == {2, 3}


@pytest.mark.parametrize("top_k", [0, 4, 5, 10**9])
def test_top_k_of_zero_or_of_the_vocabulary_keeps_all(top_k):
    assert set(many(logits_of(0.1, 0.2, 0.3, 0.4), SamplingParams(top_k=top_k), 500)) == {0, 1, 2, 3}


@pytest.mark.parametrize("settings_", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_k": 1}, {"temperature": 1e-300}])
def test_settings_that_leave_one_token_are_greedy(settings_):
    assert set(many(logits_of(0.1, 0.4, 0.3, 0.2), SamplingParams(**settings_), 200)) == {1}


def test_top_p_applies_to_what_top_k_left():
    # Of .4 and .3 alone, .4 is 57 %: enough for top_p 0.5. Of all four tokens it would not be.
    assert set(many(logits_of(0.1, 0.2, 0.3, 0.4), SamplingParams(top_k=2, top_p=0.5), 500)) == {3}
    assert set(many(logits_of(0.1, 0.2, 0.3, 0.4), SamplingParams(top_p=0.5), 500)) == {2, 3}


def test_temperature_comes_before_top_p():
    flat = SamplingParams(temperature=10.0, top_p=0.6)
    assert set(many(logits_of(0.05, 0.05, 0.1, 0.8), flat, 500)) == {0, 2, 3}


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_k=2), SamplingParams(top_p=0.5)])
def test_equal_logits_rank_by_token_id(params):
    lowest = {0} if params.greedy else {0, 1}
    assert set(many([1.0, 1.0, 1.0, 1.0], params, 200)) == lowest


# Frequencies -----------------------------------------------------------------------------------------------


def chi_square_limit(degrees: int) -> float:
    """The value that a fair draw passes once in 30,000 (Wilson and Hilferty's approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.0 * math.sqrt(2 / (9 * degrees))) ** 3


def assert_frequencies(drawn: list[int], expected: dict[int, float]) -> None:
    counts = np.bincount(drawn, minlength=max(expected) + 1)
    assert set(np.flatnonzero(counts)) <= expected.keys()
    statistic = sum((counts[i] - len(drawn) * p) ** 2 / (len(drawn) * p) for i, p in expected.items())
    assert statistic < chi_square_limit(len(expected) - 1)


SHAPE = [math.sin(3 * i) * 1.5 for i in range(40)]


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=9, temperature=1.5),
        SamplingParams(min_p=0.2),
    ],
    ids=lambda p: f"T{p.temperature}-p{p.top_p}-k{p.top_k}-m{p.min_p}",
)
def test_tokens_are_drawn_as_often_as_their_probability_says(params, by):
    expected = kept_tokens(np.array(SHAPE), params.temperature, params.top_k, params.top_p, params.min_p)
    assert_frequencies(many(SHAPE, params, 30_000, by=by), expected)


def test_consecutive_positions_and_neighbouring_seeds_are_independent():
    logits = [0.0] * 6
    pairs = dict.fromkeys(range(36), 1 / 36)
    by_position = many(logits, SamplingParams(), 36_000, by="position")
    assert_frequencies([6 * a + b for a, b in pairwise(by_position)], pairs)
    by_seed = many(logits, SamplingParams(), 36_000, by="seed")
    assert_frequencies([6 * a + b for a, b in pairwise(by_seed)], pairs)


def test_a_rare_token_in_a_large_vocabulary_keeps_its_chance():
    """One token holds half the mass, 49,151 share the rest."""
    logits = torch.zeros(49_152)
    logits[31_000] = math.log(49_151)
    drawn = many(logits.tolist(), SamplingParams(), 600)
    likely = drawn.count(31_000)
    assert abs(likely - 300) < 4 * math.sqrt(150)
    rest = [token for token in drawn if token != 31_000]
    assert len(set(rest)) > 0.97 * len(rest)
    assert_frequencies([token * 8 // 49_152 for token in rest], dict.fromkeys(range(8), 1 / 8))


# Seeds -----------------------------------------------------------------------------------------------------


def mixed_rows() -> list[SamplingRow]:
    """One request of every kind, with narrow and with wide kept sets."""
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.9, temperature=0.5),
        SamplingParams(top_p=0.999, temperature=5.0),
        SamplingParams(min_p=0.1, repetition_penalty=1.3),
        SamplingParams(temperature=0, presence_penalty=1.0, frequency_penalty=0.5),
    ]
    return [
        row(params, i, seed=100 + i, position=20 + i, prompt=range(i + 1), output=range(50, 50 + 3 * i))
        for i, params in enumerate(kinds)
    ]


def test_a_request_draws_the_same_token_alone_and_among_others():
    rows = mixed_rows() * 4
    rows = [r._replace(request_id=i) for i, r in enumerate(rows)]
    logits = torch.randn(len(rows), 5000, generator=torch.Generator().manual_seed(1)) * 3
    together = sample(logits, rows)
    backwards = sample(logits.flip(0), rows[::-1])
    assert together == backwards[::-1]
    assert together == [sample(logits[i : i + 1], [r])[0] for i, r in enumerate(rows)]


def test_another_seed_or_position_draws_another_token():
    logits = [0.0] * 1000
    base = many(logits, SamplingParams(), 200, by="position")
    assert base == many(logits, SamplingParams(), 200, by="position")
    assert sum(a == b for a, b in zip(base, many(logits, SamplingParams(), 200), strict=True)) < 10
    assert len(set(base)) > 150


def test_seeds_at_the_ends_of_their_range_are_accepted():
    tokens = sample(torch.zeros(3, 50), [row(SamplingParams(), i, seed=s) for i, s in enumerate((0, 1, 2**63 - 1))])
    assert all(0 <= t < 50 for t in tokens)


# Penalties -------------------------------------------------------------------------------------------------


def penalized(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """CTRL's repetition penalty, then OpenAI's presence and frequency, token by token."""
    out = logits.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        out[token] *= params.repetition_penalty if out[token] < 0 else 1 / params.repetition_penalty
    for token in set(output):
        out[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return out


ids = st.lists(st.integers(0, 7), max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-20, 20).map(lambda n: n / 7), min_size=8, max_size=8, unique=True),
    prompt=ids.filter(bool),
    output=ids,
    repetition=st.sampled_from([1.0, 1.1, 2.0, 0.5]),
    presence=st.sampled_from([0.0, 0.7, -1.0]),
    frequency=st.sampled_from([0.0, 0.3, -0.4]),
)
def test_penalties_change_the_logits_as_their_definitions_say(logits, prompt, output, repetition, presence, frequency):
    params = SamplingParams(
        temperature=0, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    expected = penalized(np.array(logits), params, prompt, output)
    top = np.sort(expected)
    assume(top[-1] - top[-2] > 1e-5)
    assert many(logits, params, 1, prompt=prompt, output=output) == [int(expected.argmax())]


def test_output_tokens_are_folded_in_as_they_come_whatever_else_runs():
    """Three requests decode together, one leaves, one is preempted for a while: the counts never drift."""
    sampler = Sampler(8)
    params = SamplingParams(temperature=0, frequency_penalty=0.5, repetition_penalty=1.2)
    logits = torch.linspace(1.0, 2.0, 8).repeat(3, 1)
    outputs: dict[int, list[int]] = {1: [], 2: [], 3: []}
    prompts = {1: [7], 2: [7, 6, 5] * 100, 3: [0, 1]}
    running = [[1, 2, 3]] * 4 + [[1, 3]] * 3 + [[1, 2, 3]] * 4 + [[2]] * 5
    for members in running:
        rows = [row(params, i, prompt=prompts[i], output=outputs[i]) for i in members]
        tokens = sampler(logits[: len(members)], sampler.prepare(rows)).tolist()
        for i, token in zip(members, tokens, strict=True):
            assert token == int(penalized(logits[0].numpy(), params, prompts[i], outputs[i]).argmax())
            outputs[i].append(token)


def test_a_forgotten_request_leaves_nothing_to_the_next_one_in_its_place():
    sampler = Sampler(8)
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    logits = torch.linspace(1.0, 2.0, 8)[None]
    first = row(params, 1, prompt=[1] * 300, output=[7, 6, 5])
    assert sampler(logits, sampler.prepare([first])).tolist() == [4]
    sampler.forget(1)
    sampler.forget(1)
    sampler.forget(99)
    assert sampler(logits, sampler.prepare([row(params, 1, prompt=[2])])).tolist() == [7]
    assert sampler(logits, sampler.prepare([row(params, 2, prompt=[2], output=[7])])).tolist() == [6]


def test_a_token_discarded_after_it_was_folded_in_is_taken_out_again():
    sampler = Sampler(4)
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert sampler(logits, sampler.prepare([row(params, 1, output=[3, 2])])).tolist() == [1]
    assert sampler(logits, sampler.prepare([row(params, 1, output=[3])])).tolist() == [2]


def test_only_requests_with_penalties_take_memory():
    sampler = Sampler(100)
    sampler.prepare([row(SamplingParams(temperature=t), i) for i, t in enumerate((0.0, 1.0))])
    assert len(sampler._history) == 0
    sampler.prepare([row(SamplingParams(repetition_penalty=1.1), 3)])
    assert len(sampler._history) == 1
    sampler.forget(3)
    assert len(sampler._history) == 0


# Faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=3),
        SamplingParams(repetition_penalty=1.1, presence_penalty=1.0),
    ],
    ids=["greedy", "drawn", "top_p", "top_k", "penalties"],
)
def test_a_row_of_broken_logits_is_marked_and_its_neighbours_are_not(bad, params):
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(2))
    clean = sample(logits, [row(params, i) for i in range(3)])
    logits[1, 17] = bad
    assert sample(logits, [row(params, i) for i in range(3)]) == [clean[0], BAD_TOKEN, clean[2]]


def test_minus_infinity_forbids_a_token_and_a_row_of_nothing_else_is_marked():
    logits = torch.full((2, 300), -math.inf)
    logits[0, [5, 200]] = 1.0
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=50.0, top_p=0.99)):
        drawn, broken = sample(logits, [row(params, 1), row(params, 2)])
        assert drawn in (5, 200)
        assert broken == BAD_TOKEN


def test_the_logits_given_are_left_as_they_are():
    logits = torch.randn(4, 500)
    before = logits.clone()
    sample(logits, [row(SamplingParams(temperature=2.0, repetition_penalty=2.0), i) for i in range(4)])
    assert torch.equal(logits, before)


def test_logits_that_do_not_fit_the_batch_are_refused_with_both_shapes():
    sampler = Sampler(10)
    batch = sampler.prepare([row(SamplingParams())])
    with pytest.raises(ValueError, match=r"\(2, 10\) do not fit 1 rows of a vocabulary of 10"):
        sampler(torch.zeros(2, 10), batch)


@pytest.mark.parametrize("vocab_size", [128_256, 151_936, 2**18])
def test_no_two_tokens_have_the_same_noise(vocab_size):
    """The less likely one of them would never be drawn."""
    hashes = TokenNoise(vocab_size, torch.device("cpu")).token_hash
    assert len(hashes.unique()) == vocab_size
