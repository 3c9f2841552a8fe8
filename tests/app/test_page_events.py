"""Events that the page would not send: everybody who reaches the port can put them together."""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gradio.utils import get_upload_folder

from app.chat import ChatError
from app.chat_settings import DEFAULTS, SMALL_MODEL_DEFAULTS
from app.chat_view import as_typed
from app.portable import FORMAT, VERSION
from app.settings_form import FIELDS, show_form
from app.ui_events import WAITS
from tests.app.page_port import USER, Port, opened
from tests.app.scripted_engine import Script, ScriptedEngine

FORM = ["", 0.7, 0.9, 0, 0, 1, 0, 0, "", "", "", True, False]


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with opened(tmp_path / "data") as port:
        yield port


@pytest.fixture
async def answering(tmp_path: Path) -> AsyncIterator[Port]:
    """Its chats answer a few words."""
    scripts = [Script("a few words") for _ in range(4)]
    async with opened(tmp_path / "data", ScriptedEngine(scripts=scripts)) as port:
        yield port
        await port.chats.shutdown()


def copies() -> set[Path]:
    """The files that Gradio has copied to where it gives them out."""
    return set(Path(get_upload_folder()).rglob("*"))


async def test_no_event_makes_gradio_copy_a_file_into_reach(port: Port, tmp_path: Path) -> None:
    """Gradio copies what looks like a file among an event's values, and shows the copy to everybody."""
    secret = tmp_path / "secret.txt"
    secret.write_text(f"a secret of {tmp_path}")
    before = copies()
    file = {"path": str(secret), "meta": {"_type": "gradio.FileData"}}
    events = []
    for listener in port.listeners:
        count = len(listener["inputs"])
        for value in (file, [file], {"value": file}):
            events.append((listener["id"], [USER, *[value] * (count - 1)][:count], file))
    for answer in await port.events(events):
        assert get_upload_folder() not in json.dumps(answer)
    assert copies() == before
    for prefix in ("file=", "file/"):
        assert (await port.http.get(f"/gradio_api/{prefix}{secret}")).status_code == 403


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_an_event_of_wrong_values_leaves_no_traceback(
    port: Port, everywhere: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every listener is sent every value, each in one or all of the places where a program can put it."""
    events: list[tuple[Any, ...]] = []
    for i, listener in enumerate(port.listeners):
        count = len(listener["inputs"])
        for k, value in enumerate((None, True, 1e308, "x", [1], {"a": 1})):
            named = dict.fromkeys(("id", "title", "text", "kind", "turn", "index", "value"), value)
            places: list[tuple[Any, ...]] = [
                ([USER, *[value] * (count - 1)][:count], value),
                ([USER, *[value] * (count - 1)][:count], named),
                ([value] * count,),
            ]
            if count > len(FORM):
                places.append(([USER, *[value] * (count - 1 - len(FORM)), *FORM], {"id": value}))
            chosen = places if everywhere else [places[(i + k) % len(places)]]
            events += [(listener["id"], *place) for place in chosen]
    await port.events(events)
    log = capfd.readouterr().err
    assert "Traceback" not in log and all(len(line) < 200 for line in log.splitlines()), log[-3000:]


async def test_an_event_with_too_few_values_or_for_no_listener_leaves_no_traceback(
    port: Port, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    answer = await port.event(port.number("send"), [USER])
    assert "1 of 19 values" in answer["output"]["error"]
    assert [r.getMessage() for r in caplog.records if r.name == "pageturn.page"] == [
        "an event was refused: the event brings 1 of 19 values: reload the page"
    ]
    none = {"data": [], "fn_index": 999, "session_hash": "tab"}
    assert (await port.http.post("/gradio_api/queue/join", json=none)).status_code == 404
    for name in ("nothing", "predict"):
        assert (await port.http.post(f"/gradio_api/run/{name}", json={"data": []})).status_code == 404
    wrong = await port.http.post("/gradio_api/queue/join", json={"data": "x" * 1_000_000})
    assert wrong.status_code == 422 and len(wrong.content) < 200
    assert "Traceback" not in capfd.readouterr().err


async def test_what_the_chat_refuses_is_said_on_the_page(port: Port, capfd: pytest.CaptureFixture[str]) -> None:
    answer = await port.event(port.number("export"), [USER, "a chat that another tab deleted"])
    assert "does not exist" in answer["output"]["error"]
    assert "Traceback" not in capfd.readouterr().err


async def test_a_fault_of_the_server_keeps_its_traceback_and_its_words_to_the_log(
    port: Port, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def break_down(*_: Any) -> None:
        raise TypeError("a fault of ours")

    monkeypatch.setattr(port.chats, "search", break_down)
    answer = await port.event(port.number("search"), [USER], {"text": "x"})
    assert "a fault of ours" not in json.dumps(answer)
    log = capfd.readouterr().err
    assert "Traceback" in log and "a fault of ours" in log


PAGE, NAME = "new-" + "2" * 16, "3" * 16


def listed(answer: dict[str, Any]) -> dict[str, Any]:
    """The value of the list of chats in an event's answer."""
    return answer["output"]["data"][2]


@pytest.mark.parametrize("why", ["ready", "back", "elsewhere"])
async def test_a_refresh_just_as_the_first_message_goes_off_shows_its_chat_and_says_that_it_was_taken(
    answering: Port, why: str
) -> None:
    port = answering
    names = f"{NAME} {'4' * 16}"
    before = await port.event(port.number("resync"), [USER, PAGE, names, "", *FORM], {"why": why})
    assert listed(before)["open"] == "" and listed(before)["sent"] == {NAME: "", "4" * 16: ""}
    answer = await port.event(port.number("send"), [USER, PAGE, NAME, "", "", "Hello", *FORM], None, "lost")
    chat = listed(answer)["open"]
    assert chat and listed(answer)["sent"] == {NAME: chat}
    after = await port.event(port.number("resync"), [USER, PAGE, names, "", *FORM], {"why": why})
    assert listed(after)["open"] == chat and listed(after)["sent"] == {NAME: chat, "4" * 16: ""}


async def test_a_refresh_shows_as_many_older_messages_as_before(port: Port) -> None:
    turns = [
        {"parent": n - 1 if n else None, "role": "assistant" if n % 2 else "user", "text": f"({n})", "created": 0}
        for n in range(100)
    ]
    export = {"format": FORMAT, "version": VERSION, "title": "t", "created": 0, "settings": {}, "open": 99}
    chat = await port.chats.import_chat(USER, export | {"turns": turns})
    ids = [turn.id for turn in (await port.chats.open_chat(USER, chat)).turns]
    for first, oldest in (("", 60), (str(ids[20]), 20), (str(ids[-1] + 1), 60)):
        answer = await port.event(port.number("resync"), [USER, chat, "", first, *FORM], {"why": "back"})
        messages = next(value for value in answer["output"]["data"] if isinstance(value, list))
        assert f"({oldest})" in html.unescape(json.dumps(messages[0]))


async def test_a_message_that_is_sent_twice_is_taken_once(answering: Port) -> None:
    port = answering
    chat = await port.chats.new_chat(USER)
    for target, shown, name in ((PAGE, "", NAME), (chat, chat, "5" * 16)):
        found = set()
        for _ in range(2):
            answer = await port.event(port.number("send"), [USER, target, name, "", shown, "Hello", *FORM])
            found.add(listed(answer)["open"])
            await port.chats.stop(USER, listed(answer)["open"])
        (taken_by,) = found
        turns = (await port.chats.open_chat(USER, taken_by)).turns
        assert [turn.text for turn in turns if turn.role == "user"] == ["Hello"]


async def test_messages_sent_while_the_model_loads_wait_and_are_taken_in_their_order_with_its_defaults(
    tmp_path: Path,
) -> None:
    """But for what was set. One behind another in the same chat is refused while that is answered, and kept."""
    engine = ScriptedEngine(ready=False, small_model=True, scripts=[Script(end="hang")])
    async with opened(tmp_path / "data", engine) as port:
        form = show_form(DEFAULTS)
        form[FIELDS.index("top_k")] = 7
        sends = []
        for tab, target in enumerate((PAGE, "new-" + "b" * 16, PAGE)):
            message = [USER, target, f"{tab}" * 16, "", "", f"Hello {tab}", *form]
            sends.append(asyncio.create_task(port.event(port.number("send"), message, tab=f"tab{tab}")))
            async with asyncio.timeout(20):
                said = ""
                while WAITS not in said:  # also a page that is loaded again finds it so
                    present = [USER, target, f"{tab}" * 16, "", *form]
                    said = json.dumps(await port.event(port.number("resync"), present, {"why": "back"}))
        assert WAITS in json.dumps(await port.event(port.number("say_waiting"), []))
        assert WAITS not in json.dumps(await port.event(port.number("resync"), [USER, PAGE, "9" * 16, "", *form], {}))
        assert not await port.chats.list_chats(USER)
        engine.ready = True
        *taken, refused = await asyncio.gather(*sends)
        assert "still answering" in json.dumps(refused)
        assert len(await port.chats.list_chats(USER)) == 2
        for tab, answer in enumerate(taken):
            chat = listed(answer)["open"]
            view = await port.chats.open_chat(USER, chat)
            assert view.turns[0].text == f"Hello {tab}"
            assert view.settings == SMALL_MODEL_DEFAULTS.changed({"top_k": 7})
        assert WAITS not in json.dumps(await port.event(port.number("say_waiting"), []))
        await port.chats.shutdown()


async def test_a_model_that_becomes_ready_sends_only_the_defaults_that_are_other_ones_than_shown(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent undoes what is typed before it arrives."""
    monkeypatch.setattr(port.chats, "default_settings", lambda: SMALL_MODEL_DEFAULTS)
    answer = await port.event(port.number("resync"), [USER, "", "", "", *show_form(DEFAULTS)], {"why": "ready"})
    sent = answer["output"]["data"][-len(FIELDS) :]
    changed = {n: v for n, v in zip(FIELDS, sent, strict=True) if v != {"__type__": "update"}}
    small = dict(zip(FIELDS, show_form(SMALL_MODEL_DEFAULTS), strict=True))
    assert changed == {n: small[n] for n, v in zip(FIELDS, show_form(DEFAULTS), strict=True) if small[n] != v} != {}
    assert "seed" not in changed


async def test_text_that_utf_8_cannot_hold_names_no_chat_and_breaks_no_stream(
    port: Port, capfd: pytest.CaptureFixture[str]
) -> None:
    field = {"id": "\ud800", "text": "\ud800", "title": "\ud800"}
    counts = [(listener["id"], len(listener["inputs"])) for listener in port.listeners]
    for message in await port.events([(id, [USER, *["\ud800"] * (n - 1)][:n], field) for id, n in counts]):
        assert "surrogates" not in json.dumps(message)
    assert "Traceback" not in capfd.readouterr().err


async def test_a_chat_that_is_too_long_is_refused_in_one_sentence_with_the_ways_on(tmp_path: Path) -> None:
    engine = ScriptedEngine(max_model_len=150)
    async with opened(tmp_path / "data", engine) as port:

        async def said(chat: str, text: str) -> str:
            answer = await port.event(port.number("send"), [USER, chat, "", "", chat, text, *FORM])
            return json.dumps(answer["output"]["data"], ensure_ascii=False)

        words = await said("", "x" * 145)
        assert "and the context holds 150: shorten the message. Your text is kept." in words
        chat = await port.chats.new_chat(USER)
        await (await port.chats.send(USER, chat, "x" * 60)).wait()
        ways = "start a new chat, shorten the message, or tick “Leave out older turns” in the settings"
        words = await said(chat, "x" * 80)
        assert f"and the context holds 150: {ways}. Your text is kept." in words
        await port.chats.shutdown()


async def test_a_number_out_of_its_range_is_refused_in_the_page_s_words_each_time(port: Port) -> None:
    for _ in range(3):
        answer = await port.event(port.number("change_setting"), [USER, "", "", 0.7, 2.5, *FORM[3:]])
        assert "Not kept: top_p=2.5" in json.dumps(answer["output"]["data"])


def message_box(answer: dict[str, Any]) -> str:
    """The text that an answer offers for it."""
    return next(v["draft"] for v in answer["output"]["data"] if isinstance(v, dict) and "draft" in v)


def bubbles(answer: dict[str, Any]) -> list[str]:
    """The messages that an answer shows."""
    messages = next(v for v in answer["output"]["data"] if isinstance(v, list))
    return [html.unescape(message["content"][0]["text"]) for message in messages]


async def test_a_refused_edit_is_taken_off_the_page_and_the_next_one_works(tmp_path: Path) -> None:
    """Gradio shows it before it is taken, and asks the next time by the text that it shows."""
    async with opened(tmp_path / "data", ScriptedEngine(max_model_len=150)) as port:
        chat = await port.chats.new_chat(USER)
        await (await port.chats.send(USER, chat, "  first\tone")).wait()
        listener = port.number("edit")

        async def edit(before: str, text: str) -> dict[str, Any]:
            data = {"index": 0, "previous_value": as_typed(before), "value": text}
            return await port.event(listener, [USER, chat, "", *FORM], data)

        for text, words, draft in (("x" * 200, "the context holds 150", "x" * 200), (" ", "cannot be blank", "")):
            answer = await edit("  first\tone", text)
            assert words in json.dumps(answer) and "Your text is kept" not in json.dumps(answer)
            assert bubbles(answer)[0] == "  first\tone" and message_box(answer) == draft
        answer = await edit("of another tab", "y")
        assert "changed in another tab" in json.dumps(answer) and message_box(answer) == "y"
        answer = await edit("  first\tone", "second")
        assert bubbles(answer)[0] == "second"
        await port.chats.shutdown()


async def test_a_chat_that_cannot_be_deleted_stays_on_the_page(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = await port.chats.new_chat(USER, "kept")

    async def locked(*_: Any) -> None:
        raise ChatError("the database could not be used (database is locked); nothing was changed")

    with monkeypatch.context() as patch:
        patch.setattr(port.chats, "delete_chat", locked)
        answer = await port.event(port.number("remove"), [USER, chat], {"id": chat})
    assert "database is locked" in json.dumps(answer) and "open" not in listed(answer)
    answer = await port.event(port.number("remove"), [USER, chat], {"id": chat})
    assert listed(answer)["open"] == "" and listed(answer)["chats"] == []


async def test_of_more_chats_than_are_listed_the_page_is_told_how_many(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.page_show.MOST_LISTED", 3)
    monkeypatch.setattr("app.ui_events.MOST_FOUND", 2)
    for i in range(5):
        await port.chats.new_chat(USER, f"chat {i}")
    answer = await port.event(port.number("search"), [USER], {"text": "chat"})
    value = listed(answer)
    assert (len(value["chats"]), value["older"], len(value["found"]), value["more"]) == (3, 2, 2, True)
    answer = await port.event(port.number("search"), [USER], {"text": "chat 1"})
    assert [row["title"] for row in listed(answer)["found"]] == ["chat 1"] and not listed(answer)["more"]
