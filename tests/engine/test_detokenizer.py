"""Text comes out whole: no broken characters, no stop strings, whatever the grouping of the ids."""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.detokenizer import REPLACEMENT, Detokenizer

SPECIAL = 256
CASES = Path(__file__).parents[1] / "data" / "smollm2_tokens.json"


class ByteTokenizer:
    """Every token is one byte; id 256 is special."""

    def token_bytes(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < SPECIAL else b""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < SPECIAL).decode("utf-8", "replace")


class WordTokenizer:
    """Not byte-level: words with a space before all but the first, and byte tokens as sentencepiece falls back to.

    Ids 0..255 are bytes; id 256 + n is word n. Bytes that do not join into characters show one U+FFFD each.
    """

    words = ("the", "cat", "sat", "on", "mat", "é")

    def token_bytes(self, token_id: int) -> bytes | None:
        return None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        out, run = "", b""
        for token_id in [*ids, None]:
            if token_id is not None and token_id < 256:
                run += bytes([token_id])
                continue
            if run:
                try:
                    out += run.decode()
                except UnicodeDecodeError:
                    out += REPLACEMENT * len(run)
                run = b""
            if token_id is not None:
                out += " " + self.words[token_id - 256]
        return out[1:] if out.startswith(" ") else out


def groups(ids: list[int], seed: int) -> Iterable[list[int]]:
    """The ids in order, in random groups of 0 to 4."""
    rng = random.Random(seed)
    at = 0
    while at < len(ids):
        n = rng.randint(0, 4)
        yield ids[at : at + n]
        at += n


def run(tokenizer, pieces: Iterable[list[int]], prompt: Sequence[int] = (), stop: tuple[str, ...] = ()):
    """(all text shown, the detokenizer) after pushing the pieces and finishing."""
    detokenizer = Detokenizer(tokenizer, list(prompt), stop)
    shown = [detokenizer.push(piece) for piece in pieces]
    shown.append(detokenizer.finish())
    return "".join(shown), detokenizer


def each(data: bytes) -> list[list[int]]:
    return [[b] for b in data]


# Characters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["😀", "漢字かな", "aé😀b", "👩‍👩‍👧", "𝒳\u0301", "naïve — “quoted”", "\ufffd in itself"]
)
def test_a_character_split_over_tokens_appears_whole_with_its_last_byte(text):
    detokenizer = Detokenizer(ByteTokenizer(), [])
    shown = ""
    for at, byte in enumerate(text.encode()):
        shown += detokenizer.push([byte])
        # What a strict decoder can make of the bytes so far, and nothing else.
        whole = text.encode()[: at + 1].decode("utf-8", "ignore")
        assert shown == whole
    assert shown + detokenizer.finish() == text


@given(st.binary(max_size=40), st.integers())
def test_any_bytes_in_any_grouping_show_what_one_decode_shows_less_a_cut_last_character(data, seed):
    shown, _ = run(ByteTokenizer(), groups(list(data), seed))
    assert shown == codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    whole = data.decode("utf-8", "replace")
    assert whole.startswith(shown)
    assert whole[len(shown) :].strip(REPLACEMENT) == ""


def test_a_byte_that_cannot_be_part_of_a_character_is_replaced_at_once():
    detokenizer = Detokenizer(ByteTokenizer(), [])
    assert [detokenizer.push([b]) for b in b"a\xffb"] == ["a", REPLACEMENT, "b"]


def test_an_output_that_ends_within_a_character_drops_the_half_and_keeps_its_ids():
    shown, detokenizer = run(ByteTokenizer(), each("ok😀".encode()[:-1]))
    assert shown == "ok"
    assert detokenizer.kept_tokens == 5


def test_special_tokens_are_not_shown_and_do_not_split_a_stop_string():
    shown, detokenizer = run(ByteTokenizer(), [[97, SPECIAL, 98]], stop=("ab",))
    assert shown == ""
    assert detokenizer.stopped == "ab"
    assert run(ByteTokenizer(), [[SPECIAL], [97], [SPECIAL]])[0] == "a"


def test_ids_of_a_padded_vocabulary_show_nothing():
    class Padded(ByteTokenizer):
        def token_bytes(self, token_id):
            return None if token_id > SPECIAL else super().token_bytes(token_id)

    assert run(Padded(), [[97, 300, 98]])[0] == "ab"


# The prompt's end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_the_prompt_began_is_shown_once_the_output_completes_it(cut):
    emoji = "😀".encode()
    prompt = b"before " + emoji[:cut]
    detokenizer = Detokenizer(ByteTokenizer(), list(prompt))
    shown = [detokenizer.push([b]) for b in emoji[cut:] + b"!"]
    assert "".join(shown) == "😀!"
    assert shown[: 3 - cut] == [""] * (3 - cut)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_the_prompt_began_and_the_output_does_not_complete_is_not_shown(cut):
    prompt = list("é".encode() + "😀".encode()[:cut])
    assert run(ByteTokenizer(), each(b"next"), prompt)[0] == "next"
    assert run(ByteTokenizer(), [list("漢".encode())], prompt)[0] == "漢"


def test_a_whole_prompt_leaves_nothing_behind():
    assert run(ByteTokenizer(), each(b"x"), list("é".encode()))[0] == "x"
    assert run(ByteTokenizer(), each(b"\x98\x80x"), [0xF0, 0x9F, SPECIAL])[0] == REPLACEMENT * 2 + "x"


@given(st.text(max_size=12), st.integers(0, 40), st.integers())
def test_prompt_text_and_output_text_join_wherever_the_bytes_are_cut(text, cut, seed):
    data = text.encode()
    shown, _ = run(ByteTokenizer(), groups(list(data[cut:]), seed), list(data[:cut]))
    assert data[:cut].decode("utf-8", "ignore") + shown == text


# Stop strings ----------------------------------------------------------------------------------------------


def stop_oracle(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Read character by character; stop as soon as the text ends with a stop string, the longest if several."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(
    st.text("ab é", max_size=30),
    st.lists(st.text("ab é", min_size=1, max_size=5), max_size=4).map(tuple),
    st.integers(),
)
def test_stop_strings_cut_the_text_as_a_reader_of_the_whole_text_would(text, stops, seed):
    shown, detokenizer = run(ByteTokenizer(), groups(list(text.encode()), seed), stop=stops)
    assert (shown, detokenizer.stopped) == stop_oracle(text, stops)


@given(st.text("abc", max_size=30), st.text("abc", min_size=1, max_size=4), st.integers())
def test_one_stop_string_cuts_at_its_first_occurrence(text, stop, seed):
    shown, detokenizer = run(ByteTokenizer(), groups(list(text.encode()), seed), stop=(stop,))
    assert shown == text.partition(stop)[0]
    assert (detokenizer.stopped == stop) == (stop in text)


@given(
    st.text("ab€", min_size=1, max_size=20),
    st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
)
def test_text_is_held_back_only_while_its_end_could_become_a_stop_string(text, stops):
    detokenizer = Detokenizer(ByteTokenizer(), [], stops)
    shown, arrived = "", b""
    for byte in text.encode():
        shown += detokenizer.push([byte])
        if detokenizer.stopped is not None:
            break
        arrived += bytes([byte])
        known = arrived.decode("utf-8", "ignore")
        assert known.startswith(shown)
        held = known[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)
        # Nothing that was shown could have been the start of a longer suspicion.
        assert not any(stop.startswith(known[i:]) for i in range(len(shown)) for stop in stops)


@given(
    st.text("ab é😀", max_size=20),
    st.lists(st.text("ab é😀", min_size=1, max_size=3), min_size=1, max_size=3).map(tuple),
    st.integers(),
)
def test_kept_tokens_end_with_the_last_one_that_shows_any_kept_text(text, stops, seed):
    ids = list(text.encode())
    shown, detokenizer = run(ByteTokenizer(), groups(ids, seed), stop=stops)
    if detokenizer.stopped is None:
        assert detokenizer.kept_tokens == len(ids)
    else:
        assert bytes(ids[: detokenizer.kept_tokens]).decode() == shown


def test_a_token_that_carries_both_kept_text_and_the_stop_is_kept():
    class Words(ByteTokenizer):
        def token_bytes(self, token_id):
            return (b"one", b" two\n", b"\nthree")[token_id]

    shown, detokenizer = run(Words(), [[0], [1], [2]], stop=("\n\n",))
    assert shown == "one two"
    assert detokenizer.kept_tokens == 2
    shown, detokenizer = run(Words(), [[0, 1, 2]], stop=("one",))
    assert (shown, detokenizer.kept_tokens) == ("", 0)


def test_nothing_is_shown_after_a_stop():
    detokenizer = Detokenizer(ByteTokenizer(), [], ("stop",))
    assert detokenizer.push(list(b"go st")) == "go "
    assert detokenizer.push(list(b"op and more")) == ""
    assert detokenizer.stopped == "stop"
    assert detokenizer.push(list(b"more")) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.kept_tokens == 3


def test_what_was_held_back_is_shown_at_the_end_if_no_stop_came():
    detokenizer = Detokenizer(ByteTokenizer(), [], ("###",))
    assert detokenizer.push(list(b"a ##")) == "a "
    assert detokenizer.finish() == "##"
    assert detokenizer.stopped is None


# Tokenizers without byte-level tokens ----------------------------------------------------------------------


@given(
    st.lists(st.one_of(st.integers(256, 261), st.sampled_from(["é", "漢", "😀"]).map(str.encode)), max_size=12),
    st.integers(0, 6),
    st.integers(),
)
def test_a_decoder_with_context_shows_the_same_text_piece_by_piece(items, prompt_items, seed):
    def flat(part):
        return [i for item in part for i in (item if isinstance(item, bytes) else (item,))]

    prompt, ids = flat(items[:prompt_items]), flat(items[prompt_items:])
    tokenizer = WordTokenizer()
    whole = tokenizer.decode(prompt + ids)
    shown, _ = run(tokenizer, groups(ids, seed), prompt)
    assert tokenizer.decode(prompt) + shown == whole


def test_byte_fallback_tokens_never_show_half_a_character():
    tokenizer = WordTokenizer()
    detokenizer = Detokenizer(tokenizer, [256])
    pieces = [detokenizer.push([i]) for i in [257, *"😀".encode(), 258]]
    assert pieces == [" cat", "", "", "", "😀", " sat"]
    assert run(tokenizer, each("a😀".encode()[:-1]), [256])[0] == "a"


def test_byte_fallback_tokens_that_the_prompt_began_are_completed_or_dropped():
    tokenizer = WordTokenizer()
    emoji = list("😀".encode())
    assert run(tokenizer, [[i] for i in emoji[2:]], [256, *emoji[:2]])[0] == "😀"
    assert run(tokenizer, [[257]], [256, *emoji[:2]])[0] == " cat"
    assert run(tokenizer, [[i] for i in emoji[2:]], [256, *"é".encode(), *emoji[:2]])[0] == "😀"
    assert run(tokenizer, [[257]], [256, *"é".encode(), *emoji[:2]])[0] == " cat"


@pytest.mark.parametrize("characters", ["漢😀é", "é漢字かな", "😀😀😀", "aaaa漢漢"])
def test_a_prompt_of_byte_tokens_is_looked_at_from_a_character_s_start(characters):
    data = characters.encode()
    for cut in range(len(data)):
        shown, _ = run(WordTokenizer(), each(data[cut:]), [256, *data[:cut]])
        assert data[:cut].decode("utf-8", "ignore") + shown == characters


def test_bytes_that_can_never_join_are_not_held_back_for_ever():
    shown, _ = run(WordTokenizer(), each(b"\xff" * 20), [256])
    assert shown.startswith(REPLACEMENT * 4)


def test_a_stop_string_that_only_the_end_releases_still_cuts():
    tokenizer = WordTokenizer()
    shown, detokenizer = run(tokenizer, [[256], [257, 0xF0, 0x9F]], stop=("cat",))
    assert shown == "the "
    assert detokenizer.stopped == "cat"
    assert detokenizer.kept_tokens <= 2


# The real tokenizer ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(default_model_path):
    from models.loader import load_tokenizer

    return load_tokenizer(default_model_path)


def real_cases() -> list[dict]:
    return json.loads(CASES.read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("key", ["ids", "ids_special"])
def test_every_string_of_the_tokenizer_test_comes_out_as_one_decode_gives_it(smollm2, key):
    for number, case in enumerate(real_cases()):
        ids = case[key]
        whole = smollm2.decode(ids)
        assert run(smollm2, [[i] for i in ids])[0] == whole, case
        for seed in range(3):
            assert run(smollm2, groups(ids, seed * 100 + number))[0] == whole, case


def test_every_string_of_the_tokenizer_test_shows_no_replacement_character_on_the_way(smollm2):
    for case in real_cases():
        detokenizer = Detokenizer(smollm2, [])
        shown = ""
        for token_id in case["ids"]:
            shown += detokenizer.push([token_id])
            assert case["text"].startswith(shown)
        assert shown == case["text"]


def test_every_string_joins_after_a_prompt_that_is_its_own_beginning(smollm2):
    for case in real_cases():
        ids = case["ids"]
        for cut in range(len(ids)):
            prompt = b"".join(smollm2.token_bytes(i) for i in ids[:cut]).decode("utf-8", "ignore")
            assert prompt + run(smollm2, [ids[cut:]], ids[:cut])[0] == case["text"]


def test_an_end_before_the_first_token_shows_nothing_of_the_prompt():
    """As of a request that is aborted while it waits."""
    for prompt in ([256, *"é".encode()[:1]], [256], []):
        shown, detokenizer = run(WordTokenizer(), [], prompt)
        assert (shown, detokenizer.kept_tokens) == ("", 0)


def test_an_end_before_the_first_token_is_none_of_a_prompt_that_ends_with_a_replacement_character():
    class Odd(WordTokenizer):
        def decode(self, ids, skip_special_tokens=True):
            return "".join({1: "abc", 2: " \ufffd"}[i] for i in ids)

    assert Detokenizer(Odd(), [1, 2]).finish() == ""
