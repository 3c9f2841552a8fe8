"""How turns become the Chatbot's messages, and how a message's index leads back to its turn."""

from __future__ import annotations

import html
import re

import gradio as gr
import pytest

from app import chat_view
from app.chat import ChatSettings, ChatView, Figures, JobSnapshot, TurnView


def turn(id: int, role: str, text: str = "text", **more) -> TurnView:
    return TurnView(
        **({"id": id, "role": role, "text": text, "status": "done", "created": 0.0, "siblings": (id,)} | more)
    )


def chat(*turns: TurnView) -> ChatView:
    return ChatView(id="c", title="t", settings=ChatSettings(), turns=list(turns))


def snapshot(turn_id: int, text: str, phase: str = "decode", computed: int = 0, prompt: int = 0) -> JobSnapshot:
    return JobSnapshot("c", turn_id, text, phase, computed, prompt, "running", Figures())


def contents(rendered: chat_view.Rendered) -> list[str]:
    """As Gradio sends them to the page."""
    messages = gr.Chatbot().postprocess(rendered.messages).root
    assert all(len(message.content) == 1 for message in messages)
    return [message.content[0].text for message in messages]


def test_every_message_leads_back_to_its_turn_with_thinking_folded():
    view = chat(turn(1, "user", "Q"), turn(2, "assistant", "<think>hm</think>A", line="12 out · end of turn"))
    rendered = chat_view.render(view)
    assert [t.id for t in rendered.turns] == [1, 2, 2, 2]
    assert contents(rendered)[:3] == [chat_view.as_typed("Q"), "hm", "A"]
    assert rendered.messages[1]["metadata"] == {"title": "Thoughts", "status": "done"}
    assert "12 out · end of turn" in contents(rendered)[3]


def test_the_line_cannot_carry_markup_of_an_error_or_a_token():
    view = chat(turn(1, "user"), turn(2, "assistant", line="error: <script>x</script>", notes=("token '<b>'",)))
    line = contents(chat_view.render(view))[-1]
    assert "<script>" not in line and "<b>" not in line
    assert "&lt;script&gt;" in line


def test_a_running_reply_shows_prefill_then_text_then_open_thinking():
    view = chat(turn(1, "user"), turn(2, "assistant", "", status="running"))
    waiting = chat_view.render(view, 0, snapshot(2, "", "waiting", 0, 9000))
    assert "prefill 0 / 9,000" in contents(waiting)[-1]
    prefill = chat_view.render(view, 0, snapshot(2, "", "prefill", 4096, 9000))
    assert "prefill 4,096 / 9,000" in contents(prefill)[-1]
    assert contents(chat_view.render(view, 0, snapshot(2, "Hel")))[-1] == "Hel"
    thinking = chat_view.render(view, 0, snapshot(2, "<think>so"))
    assert thinking.messages[-1]["metadata"]["status"] == "pending"
    assert len(thinking.messages) == 2  # no figures line before the end


def test_a_reply_cut_by_the_servers_end_says_so_without_figures():
    view = chat(turn(1, "user"), turn(2, "assistant", "half", status="cut", can_continue=True))
    assert "cut off" in contents(chat_view.render(view))[-1]
    assert "#pt-continue-2" in contents(chat_view.render(view))[-1]


def test_branches_of_message_and_reply_are_linked_in_the_line():
    view = chat(turn(4, "user", siblings=(1, 4, 7)), turn(6, "assistant", siblings=(5, 6)))
    line = contents(chat_view.render(view))[-1]
    assert "message 2/3" in line and "#pt-branch-1" in line and "#pt-branch-7" in line
    assert "reply 2/2" in line and "#pt-branch-5" in line


def test_a_long_chat_shows_its_end_and_loads_older_turns_in_windows():
    view = chat(*(turn(i, "user" if i % 2 else "assistant") for i in range(1, 101)))
    rendered = chat_view.render(view)
    assert (rendered.first, rendered.hidden, len({t.id for t in rendered.turns})) == (61, 60, 40)
    first = chat_view.older(view, rendered.first)
    assert chat_view.render(view, first).hidden == 20
    assert chat_view.render(view, chat_view.older(view, first)).hidden == 0
    assert chat_view.render(view, first=9999).first == 61  # a turn of another branch


def test_an_empty_chat_has_nothing_older():
    assert chat_view.older(chat(), 5) == 0
    assert chat_view.render(chat()).messages == []


@pytest.mark.parametrize(
    "text", ["  x", "a\tb", "def f():\n    if x:\n        return 1", "- a\n  - b", "Run:\n\n    make all"]
)
def test_indentation_and_tabs_reach_the_page_as_they_are(text: str):
    view = chat(turn(1, "user", text), turn(2, "assistant", f"<think>{text}</think>{text}"))
    typed, thoughts, reply = contents(chat_view.render(view))[:3]
    assert (html.unescape(typed), thoughts, reply) == (text, text.strip(), text)
    assert contents(chat_view.render(view, 0, snapshot(2, text)))[-1] == text


@pytest.mark.parametrize(
    "text", ["", "x", "a<b> & c", "__init__\n# x\n\n1. *y*", " \t`z` $$1$$", "😀 &amp; &#60;", "~" * 1000]
)
def test_what_a_user_typed_has_no_markup_left_and_can_be_read_back(text: str):
    shown = chat_view.as_typed(text)
    assert html.unescape(shown) == text
    assert re.fullmatch(r"(&#\d{7};)?(&#\d+;|[^\W_]|[^\x00-\x7f]| )*", shown)


def test_while_a_reply_streams_what_stands_above_it_is_made_once():
    view = chat(turn(1, "user", "Q"), turn(2, "assistant", "A"), turn(3, "user", "R"), turn(4, "assistant", "so"))
    known: dict[int, list[dict]] = {}
    first, second = (chat_view.render(view, 0, snapshot(4, text), known).messages for text in ("so", "so on"))
    assert all(one is other for one, other in zip(first[:-1], second[:-1], strict=True))
    assert first == chat_view.render(view, 0, snapshot(4, "so")).messages
    assert second == chat_view.render(view, 0, snapshot(4, "so on")).messages
