"""What a reader sees: markup that stays harmless, dark mode, a phone, a scroll position, an input method."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import expect

from app.portable import FORMAT, VERSION
from chatting import (
    LONG,
    ask,
    limit_replies,
    message_box,
    open_page,
    open_settings,
    replies,
    send,
    wait_for_replies,
    wait_for_streaming,
)

pytestmark = pytest.mark.browser

HOSTILE = (
    "List<String> and <script>window.hacked = 1</script> <img src=x onerror='window.hacked = 2'> "
    "<img src='{elsewhere}/a.png'> ![b]({elsewhere}/b.png) <a href='javascript:window.hacked=3'>link</a> "
    "<iframe src='{elsewhere}/c'></iframe> <style>@import '{elsewhere}/d.css';"
    " body {{ background: url({elsewhere}/e) }}</style> <form action='{elsewhere}/f'><button>go</button></form> "
    "<div style='position:fixed;inset:0;background:red;z-index:9999'>overlay</div>"
)


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[str]]]:
    """(url, paths asked for): another web server, which nothing on the page may ever reach."""
    asked: list[str] = []

    class Remember(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    other = ThreadingHTTPServer(("127.0.0.1", 0), Remember)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{other.server_port}", asked
    other.shutdown()
    other.server_close()


def test_what_is_typed_is_shown_as_it_was_typed(server, profile):
    page = open_page(profile(), server.url, max_tokens=4)
    text = (
        "# no heading, a<b and c>d, Foo::__init__, *args, $$x$$ &lt; &#60;\n\n\n1. one\n    * two\n"
        "| a | b |\n|---|---|\nhttps://example.org <b>not bold</b> ~~x~~ `y` ![z](z.png)\n===="
    )
    ask(page, text)
    assert page.locator("#chat .user").inner_text().strip() == text
    assert page.locator("#chat .user .md *:not(p)").count() == 0
    message = page.locator("#chat [data-testid=user]")
    assert message.get_attribute("aria-label").endswith(text)
    page.reload()
    wait_for_replies(page, 1)
    assert message.get_attribute("aria-label").endswith(text)
    # Before a key can come, which would be lost in what is written over it.
    opened = """async () => {
        document.querySelector("#chat [aria-label=Edit]").click();
        await new Promise(resolve => setTimeout(resolve));
        return document.querySelector("#chat .user textarea").value;
    }"""
    assert page.evaluate(opened) == text


def test_a_copy_of_what_was_typed_is_what_was_typed(server, profile):
    script = "if (navigator.clipboard) navigator.clipboard.writeText = async (text) => { window.copied = text; };"
    page = open_page(profile(scripts=[script]), server.url, max_tokens=4)
    text = "&#0000065; a<b & __init__"
    ask(page, text)
    assert page.locator("#chat [data-testid=user]").get_attribute("aria-label").endswith(text)
    page.get_by_label("Copy message").first.click()
    page.wait_for_function("window.copied")
    assert page.evaluate("window.copied") == text


def test_a_reply_s_markup_stays_harmless(server, profile, elsewhere):
    url, asked = elsewhere
    page = open_page(profile(), server.url, max_tokens=None)
    turns = [("user", None, "Hi"), ("assistant", 0, HOSTILE.format(elsewhere=url))]
    rows = [{"role": role, "parent": parent, "text": text, "created": 0} for role, parent, text in turns]
    export = {
        "format": FORMAT,
        "version": VERSION,
        "title": "t",
        "created": 0,
        "settings": {},
        "open": 1,
        "turns": rows,
    }
    file = {"name": "chat.json", "mimeType": "application/json", "buffer": json.dumps(export).encode()}
    page.locator(".pt-files input[type=file]").set_input_files(file)
    expect(page.locator("#chat .bot").first).to_contain_text("List<String>")
    if page.locator("#chat .bot .md a").count():
        page.locator("#chat .bot .md a").first.click(force=True, no_wait_after=True)
    assert page.evaluate("window.hacked") is None
    # Whatever the overlay's style says, the button under it takes the click.
    page.locator("#new-chat").click()
    expect(page.locator("#chat .user")).to_have_count(0)
    assert asked == []


def test_nothing_is_fetched_from_elsewhere(server, profile):
    context = profile()
    asked = []
    context.on("request", lambda request: asked.append(request.url))
    page = open_page(context, server.url)
    ask(page, "Hello.")
    assert [url for url in asked if not url.startswith((server.url, "data:", "blob:"))] == []


def test_the_page_follows_the_systems_colours(server, profile, tmp_path):
    page = open_page(profile(), server.url)
    ask(page, "Name two rivers.")
    ask(page, "And two lakes?")
    expect(page.locator(".pt-strip .pt-reused")).not_to_have_count(0)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.reload()
        wait_for_replies(page, 2)
        page.screenshot(path=tmp_path / f"{scheme}.png")
        background = page.evaluate("getComputedStyle(document.querySelector('.pt-top')).backgroundColor")
        brightness = sum(int(part) for part in background[background.index("(") + 1 : -1].split(",")[:3])
        assert (brightness < 300) == (scheme == "dark"), background


def test_a_phone_shows_the_chat_first_and_nothing_sideways(server, profile, tmp_path):
    page = open_page(profile(viewport={"width": 390, "height": 844}, has_touch=True), server.url, max_tokens=None)
    expect(page.locator("#sidebar")).to_be_hidden()
    send(page, "Write a very long story about a phone.")
    wait_for_streaming(page)
    page.locator("#stop").click()
    wait_for_replies(page, 1)
    page.screenshot(path=tmp_path / "phone.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    box = message_box(page).bounding_box()
    assert box["y"] + box["height"] <= 844
    ways_out = (
        page.locator("#new-chat").click,
        lambda: page.touchscreen.tap(380, 400),  # beside it
        lambda: page.keyboard.press("Escape"),
    )
    for leave in ways_out:
        page.locator(".pt-menu").click()
        expect(page.locator("#new-chat")).to_be_visible()
        leave()
        expect(page.locator("#sidebar")).to_be_hidden()
    page.locator("#kv-panel").scroll_into_view_if_needed()
    expect(page.locator(".pt-tiles")).to_be_in_viewport()


def test_scrolling_up_in_mid_stream_stays_where_the_reader_put_it(server, profile):
    page = open_page(profile(viewport={"width": 1400, "height": 500}), server.url)
    ask(page, "Write one long paragraph about forests. " + "And about every tree in it. " * 40)
    limit_replies(page, 200)
    send(page, "And now one about deserts.")
    wait_for_streaming(page)
    log = page.locator("#chat [role=log]")
    # Text that comes before the browser has told of the scrolling must not take the reader back.
    log.evaluate("e => { e.scrollTop = 0; e.querySelector('.bot').append(' '); }")
    before = page.evaluate("document.querySelector('#chat').innerText.length")
    page.wait_for_function("n => document.querySelector('#chat').innerText.length > n + 60", arg=before)
    assert log.evaluate("e => e.scrollTop") < 20
    wait_for_replies(page, 2)
    assert log.evaluate("e => e.scrollTop") < 20
    send(page, "And one about lakes.")  # whoever sends wants to see the answer
    wait_for_streaming(page)
    page.wait_for_function("e => e.scrollTop + e.clientHeight > e.scrollHeight - 60", arg=log.element_handle())


def test_enter_that_confirms_an_input_methods_candidate_does_not_send(server, profile):
    page = open_page(profile(), server.url)
    message_box(page).fill("にほん")
    message_box(page).evaluate(
        "e => ['keydown', 'keypress'].forEach(type => e.dispatchEvent(new KeyboardEvent(type,"
        " {key: 'Enter', code: 'Enter', keyCode: 229, isComposing: true, bubbles: true, cancelable: true})))"
    )
    page.wait_for_timeout(500)
    expect(page.locator("#chat .user")).to_have_count(0)
    expect(message_box(page)).to_have_value("にほん")
    message_box(page).press("Enter")
    expect(page.locator("#chat .user")).to_have_text("にほん")
    wait_for_replies(page, 1)


def test_copying_a_reply_leaves_its_figures_out(server, profile):
    page = open_page(profile(permissions=["clipboard-read", "clipboard-write"]), server.url)
    ask(page, "Say hello.")
    page.locator("#chat").get_by_label("Copy message").last.click()
    page.wait_for_function("navigator.clipboard.readText().then(text => text.length > 0)")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert "TTFT" not in copied and "pt-line" not in copied
    assert copied.strip()[:8] == page.locator("#chat .bot").last.inner_text().strip()[:8]
    assert replies(page).count() == 1


def test_a_long_chat_loads_its_end_first_and_is_not_rendered_again_while_a_reply_grows(server, profile, tmp_path):
    turns = [
        {
            "parent": i - 1 if i else None,
            "role": "user" if i % 2 == 0 else "assistant",
            "text": f"Turn {i}.\n\n- **a**\n- `b`",
            "status": "done",
            "created": 1.0,
            "figures": {},
        }
        for i in range(100)  # all of it is the prompt, which a slow machine computes for half a minute
    ]
    file = tmp_path / "long.json"
    chat = {"format": "pageturn-chat", "version": 1, "title": "Long", "created": 1.0, "settings": {}, "open": 99}
    file.write_text(json.dumps(chat | {"turns": turns}))
    page = open_page(profile(), server.url, max_tokens=None)
    page.locator(".pt-files input").set_input_files(file)
    expect(page.locator("#chat .user").first).to_contain_text("Turn 60.")
    page.locator("#older").click()
    expect(page.locator("#chat .user").first).to_contain_text("Turn 20.")

    limit_replies(page, 2000)
    send(page, "Now write a very long story about a lighthouse.")
    wait_for_streaming(page, 1)
    # While the reply grows, what has been rendered is not rendered again: that would cost every key a pause.
    rendered_again = page.evaluate(
        """() => new Promise(resolve => {
            const rows = [...document.querySelectorAll('#chat .message-row')], growing = rows.pop();
            let growths = 0, again = 0;
            new MutationObserver((records, observer) => {
                const within = row => record => row.contains(record.target);
                again += rows.filter(row => records.some(within(row))).length;
                growths += records.some(within(growing));
                if (growths < 3) return;
                observer.disconnect();
                resolve(again);
            }).observe(document.querySelector('#chat'), {subtree: true, childList: true, characterData: true});
        })"""
    )
    assert rendered_again == 0
    message_box(page).press_sequentially("Typed meanwhile")
    expect(message_box(page)).to_have_value("Typed meanwhile")
    page.locator("#stop").click()
    expect(page.locator("#stop")).to_be_hidden()


def test_stop_stands_in_the_message_boxs_row(server, profile):
    page = open_page(profile(), server.url, max_tokens=None)
    for count, viewport in enumerate([{"width": 1280, "height": 800}, {"width": 390, "height": 844}], start=1):
        page.set_viewport_size(viewport)
        idle = page.locator("#message").bounding_box()
        send(page, "Tell a very long story about a lighthouse.")
        wait_for_streaming(page)
        box, stop = page.locator("#message").bounding_box(), page.locator("#stop").bounding_box()
        page.locator("#stop").click()
        assert box["height"] == idle["height"]
        assert stop["x"] >= box["x"] + box["width"] and stop["x"] + stop["width"] <= viewport["width"]
        assert (stop["y"], stop["height"]) == pytest.approx((box["y"], box["height"]), abs=1)
        wait_for_replies(page, count)


@pytest.mark.parametrize(
    "viewport",
    [{"width": 1280, "height": 800}, pytest.param({"width": 390, "height": 844}, marks=pytest.mark.long)],
)
def test_a_message_is_edited_in_a_wide_box_and_the_arrows_between_branches_can_be_hit(server, profile, viewport):
    page = open_page(profile(), server.url, max_tokens=4)
    page.set_viewport_size(viewport)
    ask(page, "Hi.")
    page.get_by_label("Edit").first.click()
    box = page.locator("#chat .user textarea")
    log = page.locator("#chat [role=log]").bounding_box()
    assert box.bounding_box()["width"] > 0.7 * log["width"]
    one_line = box.bounding_box()["height"]
    box.fill("Ho.\n" * 6)
    assert one_line < box.bounding_box()["height"] < 0.5 * viewport["height"]
    page.get_by_label("Submit").click()
    arrow = page.get_by_title("earlier message")
    expect(arrow).to_be_visible(timeout=LONG)
    for link in page.locator("#chat .pt-links a").all():
        size = link.bounding_box()
        assert size["width"] >= 24 and size["height"] >= 24, link.inner_text()
    arrow.click()
    expect(page.locator("#chat .user")).to_have_text("Hi.")


def test_folded_settings_take_a_line_and_unfolded_ones_what_they_need(server, profile):
    page = open_page(profile(), server.url, max_tokens=None)
    assert page.locator("#settings").bounding_box()["height"] < 60
    open_settings(page)
    assert page.locator("#settings").bounding_box()["height"] > 300


def test_the_events_are_in_view_beside_the_chat_without_scrolling(server, profile):
    page = open_page(profile(), server.url, max_tokens=4)
    for word in ("one", "two", "three"):
        ask(page, f"Say {word}.")
    expect(page.locator(".pt-events li")).to_have_count(5)
    column = page.locator("#panel-column")
    assert column.evaluate("e => e.scrollTop") == 0
    for height in (800, 640):
        page.set_viewport_size({"width": 1280, "height": height})
        column.evaluate("e => e.scrollTo(0, 0)")
        events = page.locator(".pt-events").bounding_box()
        assert events["y"] > 0 and events["y"] + events["height"] <= height
        lines = [line.bounding_box() for line in page.locator(".pt-events li").all()]
        assert lines[3]["y"] + lines[3]["height"] <= height
        # What the events lie over can be scrolled out from under them.
        column.evaluate("e => e.scrollTo(0, e.scrollHeight)")
        spark, over = page.locator(".pt-spark").bounding_box(), page.locator(".pt-happened").bounding_box()
        assert spark["y"] + spark["height"] <= over["y"]


def test_the_panel_tells_ones_other_chats_from_strangers(server, profile):
    story = "Tell a long story in which a tern, a heron and an otter look for the mouth of their river in autumn."
    mine = profile()
    other_tab, stranger = open_page(mine, server.url), open_page(profile(), server.url)
    page = open_page(mine, server.url)
    ask(page, story)
    page.locator("#new-chat").click()
    expect(page.locator("#chat .user")).to_have_count(0)
    limit_replies(page, 2000)
    send(page, story)
    wait_for_streaming(page)
    some = re.compile(r" [1-9]\d*$")
    expect(page.locator(".pt-legend .pt-yours + span")).to_have_text(re.compile(r"^your other chats [1-9]\d*$"))
    expect(stranger.locator(".pt-legend .pt-others + span")).to_have_text(some)
    expect(stranger.locator(".pt-legend .pt-yours + span")).to_have_text("your other chats 0")
    expect(stranger.locator(".pt-events")).to_contain_text("another chat took")
    other_tab.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # the reader comes back to it
    expect(other_tab.locator(".pt-legend .pt-yours + span")).to_have_text(some)
    expect(other_tab.locator(".pt-events")).to_contain_text("another of your chats took")
    page.locator("#stop").click()
    wait_for_replies(page, 1)
