"""Exported chats from anywhere: what comes in is checked field by field (what comes out again: test_chat.py)."""

from __future__ import annotations

from typing import Any

import pytest

from app.portable import FORMAT, from_portable

ASKED = {"parent": None, "role": "user", "text": "q"}
ANSWERED = {"parent": 0, "role": "assistant", "text": "a"}


def exported(*turns: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {"format": FORMAT, "version": 1, "title": "t", "settings": {}, "turns": list(turns), "open": None} | other


@pytest.mark.parametrize("version", [True, 1.0, "1", None, 0, 2])
def test_another_version_is_refused_also_where_it_equals_ours(version):
    with pytest.raises(ValueError, match="version"):
        from_portable(exported(version=version))
    assert from_portable(exported())[0] == "t"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("created", True),
        ("created", float("nan")),
        ("parent", False),
        ("parent", 0.0),
        ("status", ["done"]),
        ("text", 1),
    ],
)
def test_no_field_of_a_turn_takes_a_value_of_another_kind(field, value):
    assert len(from_portable(exported(ASKED, ANSWERED))[2]) == 2
    with pytest.raises(ValueError, match=field):
        from_portable(exported(ASKED, ANSWERED | {field: value}))


@pytest.mark.parametrize(
    "settings", [{"max_tokens": True}, {"top_k": True}, {"seed": False}, {"thinking": 1}, {"temperature": True}]
)
def test_no_setting_takes_a_value_of_another_kind(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        from_portable(exported(settings=settings))


def test_the_open_turn_is_a_position():
    assert from_portable(exported(ASKED, open=0))[3] == 0
    for leaf in (False, 0.0, "0", 1):
        with pytest.raises(ValueError, match="open"):
            from_portable(exported(ASKED, open=leaf))


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "data",
    [
        exported(version=LONG),
        exported(open=LONG),
        exported(settings={LONG: 1}),
        exported(settings={"stop": LONG}),
        *(exported(ASKED | {field: LONG}) for field in ("parent", "role", "status", "created")),
    ],
    ids=lambda _: "",
)
def test_a_refusal_is_not_as_long_as_what_it_refuses(data):
    with pytest.raises(ValueError, match="…") as caught:
        from_portable(data)
    assert len(str(caught.value)) < 400
