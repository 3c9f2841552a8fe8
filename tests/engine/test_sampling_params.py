"""A bad sampling value is refused on entry, by field, value and range; a good one means what its doc says."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import pytest

from engine import BeamSearchParams, SamplingParams

NAN, INF = math.nan, math.inf


def test_the_defaults_sample_from_the_plain_distribution():
    params = SamplingParams()
    assert not params.greedy
    assert not params.has_penalties
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (1.0, 1.0, 0, 0.0, 64)


@pytest.mark.parametrize(
    ("field", "bad", "limit"),
    [
        *[("temperature", v, "between 0.0 and 1000.0") for v in (-0.1, -INF, INF, NAN, 1e39, "1", None, True)],
        *[("top_p", v, "between 0.0 and 1.0") for v in (-0.1, 1.01, NAN, "0.5", None, False)],
        *[("top_k", v, "at least 0") for v in (-1, 1.0, NAN, "5", None, True)],
        *[("min_p", v, "between 0.0 and 1.0") for v in (-0.1, 1.5, NAN, "0")],
        *[("repetition_penalty", v, "between 0.001 and 1000.0") for v in (0, 0.0, -1.0, 1e-300, 1e39, NAN, INF, "1")],
        *[(name, 10**400, name) for name in ("temperature", "top_p", "min_p", "presence_penalty")],
        *[("presence_penalty", v, "between -2.0 and 2.0") for v in (-2.1, 2.1, NAN, None)],
        *[("frequency_penalty", v, "between -2.0 and 2.0") for v in (-2.1, 2.1, NAN, None)],
        *[("max_tokens", v, "at least 1") for v in (0, -5, 1.5, "10", None, True)],
        *[("min_tokens", v, "between 0 and 64") for v in (-1, 65, 1.0, None, True)],
        *[("logprobs", v, "between 0 and 20") for v in (-1, 21, 1.0, "5", True)],
        *[("prompt_logprobs", v, "between 0 and 20") for v in (-1, 21, 1.0, "5", True)],
        *[("n", v, "between 1 and 16") for v in (0, 17, 1.0, None, True)],
        *[("logit_bias", v, "from -100 to 100") for v in ([1], "5", 5)],
        *[("seed", v, "between 0 and 9223372036854775807") for v in (-1, 2**63, 1.0, "7", True)],
        *[("stop_token_ids", v, "at least 0") for v in ([-1], ["a"], [1.0], [True])],
        *[("stop_token_ids", v, "list of integers") for v in (5, "12", {1: 2}, None)],
        *[("stop", v, "string or a list of strings") for v in (5, {"a": 1}, None, b"x")],
        *[("stop", v, "at least one character") for v in ([""], "", ["a", None], [3])],
        ("stop", ["x"] * 17, "at most 16"),
        ("stop", ["x" * 1001], "1,001 characters"),
        *[("ignore_eos", v, "True or False") for v in (1, "yes", None)],
    ],
)
def test_a_value_out_of_range_is_refused_with_field_value_and_range(field, bad, limit):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{field: bad})
    message = str(caught.value)
    assert "\n" not in message
    assert field in message
    assert limit in message
    shown = bad[0] if isinstance(bad, list) and len(bad) == 1 else bad
    assert repr(shown)[:79] in message or "17 strings" in message or "stop holds" in message
    assert len(message) < 300


@pytest.mark.parametrize(
    "field", ["temperature", "top_k", "max_tokens", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias"]
)
def test_a_refusal_is_not_as_long_as_what_it_refuses(field):
    with pytest.raises(ValueError, match="…") as caught:
        SamplingParams(**{field: {"x" * 1_000_000: 1} if field == "logit_bias" else "x" * 1_000_000})
    assert len(str(caught.value)) < 300


def test_a_stop_string_may_have_a_thousand_characters():
    assert SamplingParams(stop="x" * 1000).stop == ("x" * 1000,)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"])
def test_whole_numbers_are_numbers(field):
    assert getattr(SamplingParams(**{field: 1}), field) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.0},
        {"top_p": 1.0},
        {"min_p": 1.0},
        {"repetition_penalty": 1e-3},
        {"repetition_penalty": 1e3, "temperature": 1e3},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"max_tokens": 1},
        {"min_tokens": 64},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"logit_bias": {0: -100, 5: 100.0}},
        {"n": 16},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"stop": ["x"] * 16},
        {"top_k": 10**9},
    ],
)
def test_the_ends_of_every_range_are_allowed(settings):
    SamplingParams(**settings)


@pytest.mark.parametrize(
    ("settings", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "top_k": 40}, True),
        ({"top_p": 0}, True),
        ({"top_k": 1}, True),
        ({"min_p": 1.0}, False),
        ({"temperature": 0.01}, False),
        ({"top_k": 2, "top_p": 0.01}, False),
    ],
)
def test_greedy_is_what_leaves_one_token_whatever_the_logits(settings, greedy):
    assert SamplingParams(**settings).greedy is greedy


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), BeamSearchParams()])
def test_settings_do_not_change_under_a_request(params):
    """What was checked, and whether it is greedy, would be of settings that are no more."""
    with pytest.raises(FrozenInstanceError):
        params.max_tokens = 5
    assert replace(params, max_tokens=5).max_tokens == 5
    assert not replace(SamplingParams(temperature=0), temperature=0.9).greedy


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.1}, {"presence_penalty": -1}, {"frequency_penalty": 1}])
def test_any_penalty_that_is_not_neutral_counts(settings):
    assert SamplingParams(**settings).has_penalties


@pytest.mark.parametrize(
    ("given", "kept"), [("END", ("END",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ()), ((), ())]
)
def test_one_stop_string_or_several_are_kept_as_a_tuple(given, kept):
    assert SamplingParams(stop=given).stop == kept


def test_the_callers_lists_can_change_without_changing_the_request():
    stop, ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("b")
    ids.append(2)
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        ({5: 100.5}, r"logit_bias\[5\]=100.5 must be between -100.0 and 100.0"),
        ({5: NAN}, r"logit_bias\[5\]=nan"),
        ({5: "1"}, r"logit_bias\[5\]='1'"),
        ({-1: 1.0}, "logit_bias=-1 must be at least 0"),
        ({"5": 1.0}, "logit_bias='5' must be an integer"),
    ],
)
def test_a_bad_entry_of_a_bias_is_refused_with_its_id_or_value(bias, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(logit_bias=bias)


def test_an_empty_logit_bias_asks_for_nothing():
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_the_callers_bias_can_change_without_changing_the_request():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 3.0
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_every_way_to_stop_early_is_allowed(early_stopping):
    assert BeamSearchParams(early_stopping=early_stopping, length_penalty=-1.5).early_stopping == early_stopping


@pytest.mark.parametrize(
    "settings",
    [
        {"beam_width": 0},
        {"max_tokens": 0},
        {"length_penalty": NAN},
        {"length_penalty": 1e4},
        {"length_penalty": -5.1},
        {"length_penalty": 10**400},
        {"early_stopping": "always"},
        {"early_stopping": 1},
    ],
)
def test_beam_search_settings_are_checked_too(settings):
    (field,) = settings
    with pytest.raises(ValueError, match=field):
        BeamSearchParams(**settings)
