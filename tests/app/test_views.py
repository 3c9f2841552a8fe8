"""What the page is shown of a branch, however long it is."""

from __future__ import annotations

from collections.abc import Iterator

from app.records import TurnRow
from app.views import branch_to, can_continue, turn_views


class Counted(list[TurnRow]):
    """Turns that count how often someone has gone through them."""

    walks = 0

    def __iter__(self) -> Iterator[TurnRow]:
        self.walks += 1
        return super().__iter__()


def test_a_long_chat_of_unfinished_replies_is_gone_through_once():
    turns = Counted()
    for number in range(1, 401):
        role, status = ("assistant", "cut") if number % 2 == 0 else ("user", "done")
        turns.append(TurnRow(id=number, parent=number - 1 or None, role=role, text="x", status=status))
    branch = branch_to(turns, 400)
    turns.walks = 0
    views = turn_views(turns, branch, None)
    assert turns.walks == 1
    assert [view.id for view in views if view.can_continue] == [400]
    assert [turn.id for turn in branch if can_continue(turn, turns)] == [400]


def test_a_reply_can_go_on_where_it_is_unfinished_and_nothing_followed():
    def reply(number: int, status: str, parent: int = 1, **figures: str) -> TurnRow:
        return TurnRow(id=number, parent=parent, role="assistant", text="x", status=status, figures=figures)

    question = TurnRow(id=1, parent=None, role="user", text="q")
    replies = [
        reply(2, "done", finish="stop"),
        reply(3, "done", finish="length"),
        reply(4, "stopped"),
        reply(5, "error"),
        reply(6, "cut"),
    ]
    follow_up = TurnRow(id=7, parent=6, role="user", text="q")
    turns = [question, *replies, follow_up]
    shown = {turn.id: turn_views(turns, [question, turn], None)[-1] for turn in replies}
    assert [number for number, view in shown.items() if view.can_continue] == [3, 4, 5]
    assert [turn.id for turn in turns if can_continue(turn, turns)] == [3, 4, 5]
    assert all(view.siblings == (2, 3, 4, 5, 6) for view in shown.values())
