"""The line under a reply, thinking folded out of it, titles, and owner slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.figures import Figures, figures_line, notes
from app.owner_slots import OwnerSlots
from app.text import UNSEEN_TITLE, title_of, title_text
from app.thinking import split_thinking


def test_the_line_reads_exactly_as_agreed():
    figures = Figures(
        ttft=0.0414, prompt_tokens=1090, cached_tokens=1024, output_tokens=212, decode_rate=57.6, finish="stop"
    )
    assert figures_line(figures) == "TTFT 41 ms · 1,090 prompt (1,024 cached) · 212 out · 58 tok/s · end of turn"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"finish": "stop"}, "end of turn"),
        ({"finish": "stop", "stop_string": "END"}, "stop string"),
        ({"finish": "length"}, "length limit (max tokens)"),
        ({"finish": "length", "context_full": True}, "context full"),
        ({"finish": "abort", "cut_by": "user"}, "stopped"),
        ({"finish": "abort", "cut_by": "shutdown"}, "cut off (the server ended)"),
        ({"finish": "error", "error": "out of blocks"}, "error: out of blocks"),
    ],
)
def test_the_last_word_says_why_it_ended(fields, words):
    line = figures_line(Figures(ttft=1.2345, prompt_tokens=8, output_tokens=1, **fields))
    assert line == f"TTFT 1,234 ms · 8 prompt (0 cached) · 1 out · {words}"


def test_figures_survive_json_and_fields_of_other_versions():
    figures = Figures(ttft=0.5, stop_string="x", diverged_at=3)
    assert Figures.from_json(figures.to_json()) == figures
    assert Figures.from_json({"ttft": 0.5, "from_the_future": 1}) == Figures(ttft=0.5)


def test_notes_say_nothing_where_nothing_is_to_say():
    assert notes(Figures(reused_prefix=10, stored_before=10)) == []


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("plain", ("", "plain", True)),
        ("", ("", "", True)),
        ("<th", ("", "", True)),
        ("<thinker>", ("", "<thinker>", True)),
        ("<think>", ("", "", False)),
        ("\n<think>\nhm\n</think>\n\nYes", ("hm", "Yes", True)),
        ("<think>hm</thi", ("hm", "", False)),
        ("<think>a < b</think>c", ("a < b", "c", True)),
        ("I say <think>no</think>", ("", "I say <think>no</think>", True)),
        ("<think></think>Yes</think>", ("", "Yes</think>", True)),
    ],
)
def test_thinking_is_split_off_at_the_start_only(text, split):
    assert split_thinking(text) == split


@given(st.text(alphabet="ab <>/\n"), st.text(alphabet="cd <>/\n"))
def test_as_a_reply_grows_its_thinking_never_shows_a_piece_of_a_tag(thinking, answer):
    whole = f"<think>{thinking}</think>{answer}"
    for end in range(len(whole)):
        split = split_thinking(whole[:end])
        if not split.closed:
            assert thinking.strip().startswith(split.thinking)
        if end < len("<think>"):
            assert split == ("", "", True)


@pytest.mark.parametrize(
    ("message", "title"),
    [
        ("Hello there", "Hello there"),
        ("  two\n lines ", "two lines"),
        ("a " * 100, "a a a a a a a a a a a a a a a a a a a a a a a a…"),
        ("word " * 9 + "incomprehensibilities", "word word word word word word word word word…"),
        ("长" * 100, "长" * 48 + "…"),
        ("\n" * 200 + "hello there", "hello there"),
        ("a" + " " * 200 + "b", "a b"),
        ("\u200b" * 200 + " \ufeffhello", "hello"),
        ("👩\u200d💻 works", "👩\u200d💻 works"),
        ("\u200b\u2800 \u3164\x00", UNSEEN_TITLE),
    ],
)
def test_a_title_is_the_first_words(message, title):
    assert title_of(message) == title


def test_a_title_of_a_users_own_is_checked():
    assert title_text("  My \n trip ") == "My trip"
    for title in ("", " \n", "x" * 201, None, 5):
        with pytest.raises(ValueError, match="1 to 200"):
            title_text(title)


def test_owner_slots_are_stable_and_the_least_recently_used_is_given_on():
    slots = OwnerSlots(size=3)
    a, b, c = (slots.slot(x) for x in "abc")
    assert sorted((a, b, c)) == [1, 2, 3]
    assert slots.slot("a") == a
    assert slots.known("b") == b  # a look is no use
    assert slots.slot("d") == b  # "b" was not used for longest
    assert slots.known("b") == 0
    assert (slots.slot("a"), slots.slot("c"), slots.slot("d")) == (a, c, b)
