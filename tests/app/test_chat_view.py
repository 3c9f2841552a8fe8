"""How turns become the Chatbot's messages, and how a message's index leads back to its turn."""

from __future__ import annotations

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
    return [message["content"] for message in rendered.messages]


def test_every_message_leads_back_to_its_turn_with_thinking_folded():
    view = chat(turn(1, "user", "Q"), turn(2, "assistant", "<think>hm</think>A", line="12 out · end of turn"))
    rendered = chat_view.render(view)
    assert [t.id for t in rendered.turns] == [1, 2, 2, 2]
    assert contents(rendered)[:3] == ["Q", "hm", "A"]
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
