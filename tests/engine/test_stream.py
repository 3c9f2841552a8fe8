"""StreamState: one request's steps as text; what is shown, what is kept, and why it ended."""

from __future__ import annotations

import asyncio
from itertools import islice

import pytest

from engine.origin import Origin
from engine.outputs import Delta, RequestMetrics, RequestPriority, StepOutput
from engine.request_stream import BlockingStream, RequestStream, Submission, hand_over
from engine.sampling_params import SamplingParams
from engine.sequence import as_array
from engine.stream import StreamState, merge

EOS = 256


class Bytes:
    """A tokenizer whose token i is the byte i; 256 is special."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", "replace")


class Pieces:
    """A tokenizer without byte-level tokens: token i is the i-th character of its alphabet."""

    def token_bytes(self, token_id: int) -> None:
        return None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join("abcdef\ufffd"[i] for i in ids)


BYTES = Bytes()


def state(stop: tuple[str, ...] = (), prompt: str = "hi", tokenizer: object = BYTES, **params: object) -> StreamState:
    settings = SamplingParams(max_tokens=100, stop=stop, **params)  # type: ignore[arg-type]
    return StreamState(7, list(prompt.encode()), settings, tokenizer)  # type: ignore[arg-type]


def step(ids: bytes | list[int], reason: str | None = None) -> StepOutput:
    return StepOutput(7, list(ids), reason, num_prompt_tokens=2, metrics=RequestMetrics(arrival=1.0))


def run(stream: StreamState, text: str, reason: str = "length") -> list[Delta]:
    """One token a step; `reason` comes with the last."""
    data = text.encode()
    deltas = []
    for i in range(len(data)):
        deltas.append(stream.feed(step(data[i : i + 1], reason if i == len(data) - 1 else None)))
        if stream.finished:
            break
    return deltas


def test_the_end_of_sequence_id_is_neither_shown_nor_kept() -> None:
    stream = state()
    stream.feed(step(b"ok"))
    last = stream.feed(step([EOS], "stop"))
    assert (last.text, last.token_ids, last.num_output_tokens) == ("", [], 2)
    assert (stream.text, stream.token_ids, stream.finish_reason, stream.stop_reason) == ("ok", [*b"ok"], "stop", None)


def test_a_stop_token_id_is_named_as_the_reason() -> None:
    stream = state(stop_token_ids=[33])
    stream.feed(step(b"ok"))
    last = stream.feed(step(b"!", "stop"))
    assert last.stop_reason == stream.output().stop_reason == 33
    assert stream.text == "ok"


def test_a_stop_string_split_over_tokens_is_never_shown_and_its_ids_are_cut() -> None:
    stream = state(("END",))
    deltas = run(stream, "one ENDless EN END of it")
    assert "".join(d.text for d in deltas) == stream.text == "one "
    assert stream.stopped_by_text
    assert (stream.finish_reason, stream.stop_reason) == ("stop", "END")
    assert stream.output().token_ids == [*b"one "]
    assert deltas[-1].num_output_tokens == 4


def test_text_is_held_back_only_while_it_could_become_a_stop_string() -> None:
    shown = [d.text for d in run(state(("END",)), "an Enemy EN. ")]
    assert shown == ["a", "n", " ", "", "En", "e", "m", "y", " ", "", "", "EN.", " "]


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_what_was_held_back_is_shown_at_the_end_if_no_stop_came(reason: str) -> None:
    stream = state(("END",))
    deltas = run(stream, "the EN", reason)
    assert deltas[-1].text == "EN"
    assert (stream.text, stream.finish_reason, stream.stop_reason) == ("the EN", reason, None)


def test_what_was_held_back_is_shown_when_the_end_brings_no_token() -> None:
    stream = state(("END",))
    stream.feed(step(b"the EN"))
    assert stream.feed(step([], "abort")).text == "EN"


def test_a_stop_string_completed_by_the_very_last_token_is_a_stop_and_needs_no_abort() -> None:
    stream = state(("END",))
    run(stream, "the END", "length")
    assert (stream.text, stream.finish_reason, stream.stopped_by_text) == ("the ", "stop", False)


def test_a_stop_string_that_only_the_end_releases_is_a_stop() -> None:
    """A tokenizer without byte-level tokens may hold text back until it is known that nothing follows."""
    stream = state(("ab",), tokenizer=Pieces(), prompt="")
    stream.feed(step([2, 0, 1, 6]))
    stream.feed(step([], "length"))
    assert (stream.text, stream.finish_reason, stream.stop_reason) == ("c", "stop", "ab")
    assert stream.token_ids == [2]


@pytest.mark.parametrize("text", ["a 🎉 party", "漢字かな", "👩‍👩‍👧 family", "\u0301e"])
def test_a_character_split_over_tokens_is_shown_whole(text: str) -> None:
    deltas = run(state(), text)
    assert "".join(d.text for d in deltas) == text
    assert not any("\ufffd" in d.text for d in deltas)


def test_a_character_split_over_tokens_before_a_stop_string_is_shown_whole() -> None:
    stream = state(("🎉🎉", "終"))
    deltas = run(stream, "one 🎉 two 終わり")
    assert "".join(d.text for d in deltas) == "one 🎉 two "
    assert not any("\ufffd" in d.text for d in deltas)
    assert stream.stop_reason == "終"


def test_a_reply_cut_within_a_character_shows_no_broken_half() -> None:
    stream = state()
    stream.feed(step("ok 🎉".encode()[:-1], "length"))
    assert stream.text == "ok "
    assert len(stream.token_ids) == 6, "the ids keep the half, so that it can be continued"


def test_a_prompt_that_ends_within_a_character_shows_nothing_of_the_prompt() -> None:
    prompt, rest = [*"say 漢".encode()][:-1], [*"漢!".encode()][2:]
    stream = StreamState(7, prompt, SamplingParams(), BYTES)  # type: ignore[arg-type]
    assert [stream.feed(step([b])).text for b in rest] == ["漢", "!"]
    other = StreamState(7, prompt, SamplingParams(), BYTES)  # type: ignore[arg-type]
    assert "".join(other.feed(step([b])).text for b in b"yes") == "yes"


def test_without_a_tokenizer_ids_come_and_no_text() -> None:
    stream = state(tokenizer=None)
    delta = stream.feed(step([5, 6]))
    assert (delta.text, delta.token_ids) == ("", [5, 6])
    assert stream.feed(step([9], "length")).num_output_tokens == 3


def test_a_result_does_not_change_with_the_steps_that_follow() -> None:
    stream = state()
    stream.feed(step(b"ab"))
    early = stream.output()
    stream.feed(step(b"cd"))
    assert (early.text, early.token_ids, early.outputs[0].token_ids) == ("ab", [*b"ab"], [*b"ab"])


def test_merged_deltas_say_what_all_of_them_said() -> None:
    stream = state()
    first = stream.feed(StepOutput(7, [*b"a"], block_table=[4], num_prompt_tokens=2))
    second = stream.feed(step(b"b"))
    third = stream.feed(step(b"c", "length"))
    merged = merge(merge(merge(None, first), second), third)
    assert (merged.text, merged.token_ids, merged.block_table) == ("abc", [*b"abc"], [4])
    assert (merged.finish_reason, merged.num_output_tokens) == ("length", 3)


def test_a_last_word_that_was_not_read_yet_stands_whatever_another_thread_delivers_behind_it() -> None:
    """At a shutdown that does not wait for the engine's thread; the reader would wait for ever."""
    request = Submission(7, [1], as_array([1]), SamplingParams(), RequestPriority.NORMAL, Origin(), 0.0)
    stream = BlockingStream(request, None, lambda *_: None)
    for output in (StepOutput(7, [5]), StepOutput(7, [], "abort"), StepOutput(7, [6])):
        stream.put(output)
    assert [(delta.token_ids, delta.finish_reason) for delta in islice(stream, 1)] == [([5], "abort")]


class Failing(Bytes):
    """Cannot tell the bytes of the letter x."""

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == ord("x"):
            raise KeyError("x")
        return super().token_bytes(token_id)


def submission(request_id: int, n: int = 1) -> Submission:
    prompt = [*b"hi"]
    params = SamplingParams(n=n)
    return Submission(request_id, prompt, as_array(prompt), params, RequestPriority.NORMAL, Origin(), 0.0)


async def test_a_reply_whose_text_cannot_be_made_ends_alone() -> None:
    """The others of its step come through, and so does its other continuation."""
    aborted: list[tuple[int, str, int | None]] = []
    loop = asyncio.get_running_loop()
    streams = [
        RequestStream(submission(i, n), Failing(), lambda *what: aborted.append(what), loop)  # type: ignore[arg-type]
        for i, n in ((1, 2), (2, 1))
    ]
    first, second = streams
    hand_over([(first, StepOutput(1, [*b"ax"], index=0, num_prompt_tokens=2))])
    hand_over(
        [
            (first, StepOutput(1, [*b"b"], index=0)),  # what the engine sends before it hears of it
            (first, StepOutput(1, [*b"c"], "length", index=1, num_prompt_tokens=2)),
            (second, StepOutput(2, [*b"d"], "length", num_prompt_tokens=2)),
        ]
    )
    deltas = [delta async for delta in first]
    assert [(delta.index, delta.text, delta.finish_reason) for delta in deltas] == [
        (0, "", "error"),
        (1, "c", "length"),
    ]
    assert deltas[0].error == "the text of this reply cannot be made: KeyError: 'x'"
    assert [(delta.text, delta.finish_reason) async for delta in second] == [("d", "length")]
    assert aborted == [(1, "abort", 0)]
    assert first.output().outputs[0].finish_reason == "error"


def test_a_thread_that_reads_a_reply_whose_text_cannot_be_made_is_told_so() -> None:
    aborted: list[tuple[int, str, int | None]] = []
    stream = BlockingStream(submission(7), Failing(), lambda *what: aborted.append(what))  # type: ignore[arg-type]
    stream.put(StepOutput(7, [*b"x"], num_prompt_tokens=2))
    assert [delta.finish_reason for delta in stream] == ["error"]
    assert aborted == [(7, "abort", 0)]
