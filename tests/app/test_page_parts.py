"""The page's small parts: which event of a tab may show, what its arguments may be, the settings form."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import gradio as gr
import pytest

from app.chat import ChatSettings, ChatView, Figures, TurnView
from app.kv_panel import panel_value
from app.page_arguments import as_message, as_text, as_turn_id, choice_of, event_field, identity
from app.page_tabs import REMEMBERED, Tab, Tabs
from app.sent_messages import SentMessages
from app.settings_form import FIELDS, is_unfilled, left_alone, read_form, show_form

DEFAULTS = ChatSettings(temperature=0.2, max_tokens=512)


def test_only_the_newest_event_of_a_tab_may_show():
    tabs, tab, other = Tabs(), Tab("tab"), Tab("other")
    old, new = tabs.show(tab, "a"), tabs.show(tab, "b")
    assert not tabs.is_newest(tab, old) and tabs.is_newest(tab, new)
    assert tabs.is_newest(other, tabs.show(other, "a")) and tabs.is_newest(tab, new)


def test_an_event_from_before_the_reader_turned_to_another_chat_shows_nothing():
    tabs, before, after = Tabs(), Tab("tab", 1), Tab("tab", 2)
    assert tabs.show(before, "a") and not tabs.has_turned(before)
    assert tabs.show(after, "b") and tabs.has_turned(before) and not tabs.has_turned(after)
    assert tabs.show(before, "a") == 0 and not tabs.is_newest(before, 0) and tabs.shows(before) == "b"
    assert tabs.show(after, "b") == tabs.newest(after)


def test_a_reply_is_followed_only_in_the_tab_that_shows_its_chat():
    tabs, tab = Tabs(), Tab("tab")
    assert tabs.follow(tab, "a") == 0
    tabs.show(tab, "a")
    first = tabs.follow(tab, "a")
    assert tabs.is_newest(tab, first) and tabs.follow(tab, "b") == 0 and tabs.is_newest(tab, first)
    tabs.show(tab, "b")
    assert tabs.follow(tab, "a") == 0 and not tabs.is_newest(tab, first)


def test_tabs_are_forgotten_in_the_order_of_their_last_use():
    tabs, tab = Tabs(), Tab("first")
    first = tabs.show(tab, "a")
    for n in range(REMEMBERED):
        tabs.show(Tab(str(n)), "a")
    assert not tabs.is_newest(tab, first)
    assert tabs.shows(tab) is None


@pytest.mark.parametrize(("user", "choice"), [("0" * 32, 0), ("0" * 32 + ":17", 17), ("0" * 32 + ":x", 0), (None, 0)])
def test_the_page_says_with_its_user_how_often_the_reader_has_turned_to_a_chat(user, choice):
    assert choice_of(user) == choice
    if choice:
        assert identity(SimpleNamespace(username=None), user, login=False) == "0" * 32


async def test_a_message_is_known_by_its_name_and_a_page_without_a_chat_by_what_it_became():
    sent, page, name = SentMessages(), "new-" + "0" * 16, "1" * 16
    assert await sent.became("ada", page) == "" and sent.taken_by("ada", name) == ""

    async def send() -> None:
        async with sent.sending("ada", page, name) as sender:
            await asyncio.sleep(0)
            assert not sender.chat, "two at once"
            await asyncio.sleep(0)
            sender.chat = "a"
            sent.note("ada", name, "a")

    sending = asyncio.create_task(send())
    await asyncio.sleep(0)
    assert await sent.became("ada", page) == "a"  # it waits for what is being sent
    await sending
    assert sent.taken_by("ada", name) == "a" and sent.taken_by("bob", name) == ""
    assert await sent.became("bob", page) == ""
    async with sent.sending("ada", "x" * 65, "") as other:
        other.chat = "a"
    assert await sent.became("ada", "x" * 65) == ""  # no name that a page has: not remembered
    sent.note("ada", "no name of a message", "a")
    assert sent.taken_by("ada", "no name of a message") == ""


async def test_a_message_that_two_copies_of_a_tab_send_at_once_is_taken_once():
    sent, name, taken = SentMessages(), "1" * 16, []

    async def send(page: str) -> None:
        async with sent.sending("ada", page, name):
            if not sent.taken_by("ada", name):
                await asyncio.sleep(0.01)
                taken.append(page)
                sent.note("ada", name, page)

    await asyncio.gather(*(send("new-" + letter * 16) for letter in "ab"))
    assert taken == ["new-" + "a" * 16]


@pytest.mark.parametrize("user", [None, "", "A" * 32, "0" * 31, 7, "../../etc", "0" * 32 + "\n"])
def test_an_id_that_no_browser_made_is_refused(user):
    with pytest.raises(gr.Error):
        identity(SimpleNamespace(username=None), user, login=False)


def test_with_a_login_the_browsers_id_counts_for_nothing():
    assert identity(SimpleNamespace(username="ada"), "0" * 32, login=True) == "login:ada"
    with pytest.raises(gr.Error):
        identity(SimpleNamespace(username=None), "0" * 32, login=True)


@pytest.mark.parametrize("value", [1, [], {}, True, b"x"])
def test_arguments_that_are_no_text_are_refused(value):
    with pytest.raises(gr.Error):
        as_text(value)


@pytest.mark.parametrize(
    "refused",
    [
        lambda long: as_text([long]),
        lambda long: as_turn_id(long),
        lambda long: ChatSettings(temperature=long),
        lambda long: ChatSettings(stop=long),
        lambda long: ChatSettings(thinking=long),
        lambda long: ChatSettings(system_prompt=[long]),
        lambda long: ChatSettings().changed({long: 1}),
        lambda long: read_form([long if name == "top_k" else None for name in FIELDS], DEFAULTS),
    ],
)
def test_a_refusal_is_not_as_long_as_what_it_refuses(refused):
    with pytest.raises((gr.Error, ValueError)) as caught:
        refused("x" * 1_000_000)
    assert len(str(caught.value)) < 400 and "…" in str(caught.value)


@pytest.mark.parametrize("value", ["x", [1], {}, "1.5"])
def test_turn_ids_that_are_no_numbers_are_refused(value):
    if value == {}:
        assert as_turn_id(value) == 0
    else:
        with pytest.raises(gr.Error):
            as_turn_id(value)


def test_a_message_may_come_as_text_or_as_parts():
    assert as_message("a") == as_message([{"type": "text", "text": "a"}]) == "a"


def test_the_form_shows_and_reads_back_every_setting():
    settings = ChatSettings(
        temperature=1.5, top_p=0.5, top_k=7, min_p=0.1, repetition_penalty=1.2, presence_penalty=-1.0,
        frequency_penalty=0.5, max_tokens=99, seed=3, stop=("a", "b c"), system_prompt="Be brief.", thinking=False,
        leave_out_older=True,
    )  # fmt: skip
    assert read_form(show_form(settings), DEFAULTS) == settings
    assert read_form(show_form(DEFAULTS), ChatSettings()) == DEFAULTS


STOPS = ("\n\n", "a", "\\n", "\\", "\\\n\\", "a\r\nb", "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029", "\\u000a", "\\d", " \t")


def test_every_stop_string_has_a_line_of_the_form_to_itself():
    settings = ChatSettings(stop=STOPS)
    form = show_form(settings)
    shown = form[FIELDS.index("stop")]
    assert shown.splitlines()[:3] == [r"\n\n", "a", r"\\n"] and len(shown.splitlines()) == len(STOPS)
    assert read_form(form, DEFAULTS).stop == STOPS
    assert read_form(show_form(read_form(form, DEFAULTS)), DEFAULTS).stop == STOPS


@pytest.mark.parametrize(
    ("typed", "stop"),
    [
        ("a\n\n b \nc\r\nd", ("a", " b ", "c", "d")),  # without a backslash: as it stands
        ("Human:\\n", ("Human:\n",)),
        ("\\d\n\\", ("\\d", "\\")),  # before what needs none, a backslash is one
        ("C:\\users", ("C:\\users",)),
        (None, ()),
    ],
)
def test_a_line_of_stop_strings_means_what_was_typed(typed, stop):
    form = show_form(DEFAULTS)
    form[FIELDS.index("stop")] = typed
    assert read_form(form, DEFAULTS).stop == stop


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -1, "temperature"),
        ("temperature", "hot", "temperature"),
        ("top_k", "1.5", "top_k"),
        ("max_tokens", "many", "max_tokens"),
        ("max_tokens", "0", "max_tokens"),
        ("seed", "-1", "seed"),
        ("stop", "\n".join("abcdefghijklmnopq"), "stop"),
        ("system_prompt", 5, "system_prompt"),
        ("thinking", "yes", "thinking"),
    ],
)
def test_a_wrong_value_is_named(field, value, words):
    form = show_form(DEFAULTS)
    form[FIELDS.index(field)] = value
    with pytest.raises(ValueError, match=words):
        read_form(form, DEFAULTS)


def test_a_form_of_another_version_of_the_page_is_refused():
    with pytest.raises(ValueError, match="reload"):
        read_form(show_form(DEFAULTS)[:-1], DEFAULTS)


def panel_of(*figures: Figures, prefill_rate: float = 0.0) -> list[dict]:
    turns = [
        TurnView(id=n, role="assistant", text="", status="done", created=0.0, figures=each, siblings=(n,))
        for n, each in enumerate(figures, start=1)
    ]
    view = ChatView(id="c", title="t", settings=DEFAULTS, turns=turns, owner=3, context_used=7, context_limit=100)
    value = panel_value(view, None, prefill_rate)
    assert (value["owner"], value["context_used"], value["context_limit"]) == (3, 7, 100)
    return value["turns"]


def test_the_panel_estimates_a_prefill_without_the_cache_from_what_was_measured():
    cold = Figures(ttft=2.0, prompt_tokens=100, cached_tokens=0, output_tokens=5, block_size=16)
    warm = Figures(ttft=0.1, prompt_tokens=200, cached_tokens=192, output_tokens=5, block_size=16)
    assert [turn["without"] for turn in panel_of(cold, warm, prefill_rate=1000.0)] == pytest.approx([2.0, 0.292])
    # Before the engine has measured it there is none: a reply's own time holds more than its prompt's.
    assert [turn["without"] for turn in panel_of(cold, warm)] == [None, None]
    assert panel_of(Figures())[0]["without"] is None


def test_a_reply_stopped_before_its_first_token_has_no_estimate():
    stopped = Figures(ttft=0.0, prompt_tokens=1291, cached_tokens=16, output_tokens=0, block_size=16)
    assert panel_of(stopped, prefill_rate=400.0)[0]["without"] is None


def test_the_panel_sends_the_last_replies_with_their_numbers():
    turns = panel_of(*(Figures(prompt_tokens=n) for n in range(1, 31)))
    assert [turn["n"] for turn in turns] == list(range(11, 31))
    assert [turn["prompt"] for turn in turns] == list(range(11, 31))


def test_a_form_that_the_server_has_not_filled_in_yet_is_known_as_such():
    """Sliders without a value send their minimum, an empty number sends nothing."""
    assert is_unfilled(["", 0, 0, None, 0, 0.5, -2, -2, "", "", "", False, False])
    assert not is_unfilled(show_form(DEFAULTS))
    assert not is_unfilled(show_form(DEFAULTS.changed({"temperature": 0.0, "top_k": 0})))


def test_an_event_without_what_it_should_bring_is_refused_in_words():
    for data in (None, {}, {"id": "x"}):
        with pytest.raises(gr.Error, match="names no title"):
            event_field(gr.EventData(None, data), "title")
    assert event_field(gr.EventData(None, {"title": "x"}), "title") == "x"


def test_half_a_character_in_a_setting_cannot_make_its_chat_unreadable():
    settings = DEFAULTS.changed({"system_prompt": "a \ud800 b", "stop": ["\udfff"]})
    assert settings.system_prompt == "a \ufffd b" and settings.stop == ("\ufffd",)


@pytest.mark.parametrize("name", ["top_k", "max_tokens"])
def test_a_count_that_json_cannot_carry_is_refused(name: str):
    with pytest.raises(ValueError, match=f"{name}=.*at most 2,147,483,647"):
        DEFAULTS.changed({name: 10**30})


def test_the_controls_that_were_left_alone_are_told_from_those_that_were_set() -> None:
    form = show_form(DEFAULTS)
    assert left_alone(form, DEFAULTS) == set(range(len(FIELDS)))
    form[FIELDS.index("max_tokens")], form[FIELDS.index("temperature")] = "16", 0.9
    assert {FIELDS[i] for i in left_alone(form, DEFAULTS)} == {*FIELDS} - {"max_tokens", "temperature"}
