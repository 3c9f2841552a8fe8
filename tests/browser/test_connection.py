"""Reloads, lost networks, servers that end: the page only watches, so nothing of a chat is lost by any of them."""

from __future__ import annotations

import re
import signal

import pytest
from playwright.sync_api import expect

from app_process import AppProcess
from chatting import (
    ask,
    last_reply,
    late_events,
    limit_replies,
    message_box,
    open_page,
    open_settings,
    replies,
    send,
    wait_for_replies,
    wait_for_streaming,
)
from server_process import Cable, Server

pytestmark = pytest.mark.browser

MARK = "window.notReloaded = true"
# A socket that is set dead goes silent, and the server does not learn that the page is gone.
DEAD_SOCKETS = """
window.WebSocket = class extends WebSocket {
  constructor(...args) { super(...args); (window.sockets ??= []).push(this); }
  set onmessage(f) { super.onmessage = (e) => { if (!this.dead) f(e); }; }
  close() { if (!this.dead) super.close(); }
};"""
# The answers to messages that were sent are lost while window.losing is set.
LOST_ANSWERS = """
window.WebSocket = class extends WebSocket {
  set onmessage(f) { super.onmessage = (e) => { if (!window.losing || !/"sent":\\{"/.test(e.data)) f(e); }; }
};"""
# No socket for the events gets through.
NO_SOCKETS = """
const Socket = WebSocket;
window.WebSocket = class {
  constructor(url) {
    if (!/stream/.test(url)) return new Socket(url);
    setTimeout(() => this.onclose?.({}));
  }
  close() {}
};"""


def letters(text: str) -> str:
    """What the page shows of a text as it is stored, too."""
    return re.sub("[^A-Za-z]", "", text)


def test_a_reload_in_mid_stream_attaches_again_and_the_text_is_whole(server, profile):
    page = open_page(profile(), server.url, max_tokens=2000)
    send(page, "Write a long story about bridges.")
    before = wait_for_streaming(page)
    page.reload()
    after = wait_for_streaming(page)
    assert after.startswith(before[:20])
    page.locator("#stop").click()
    assert int(wait_for_replies(page, 1)["out"]) > 0
    assert last_reply(page).startswith(before[:20])
    open_settings(page)
    expect(page.locator("#max-tokens textarea, #max-tokens input")).to_have_value("2000")


def test_a_network_lost_for_three_seconds_is_caught_up_without_a_reload(server, profile, cable):
    page = open_page(profile(), cable.url, max_tokens=300)
    send(page, "Write a story about a train.")
    before = wait_for_streaming(page)
    message_box(page).fill("A draft that must stay.")
    page.evaluate(MARK)
    cable.cut()
    expect(page.locator(".pt-state")).to_contain_text("Connection lost")
    page.locator("#stop").click()  # does not get through, and must not take the page down
    page.wait_for_timeout(3000)
    cable.mend()
    expect(page.locator(".pt-state")).to_have_text("")
    wait_for_replies(page, 1)
    assert last_reply(page).startswith(before[:20]) and len(last_reply(page)) > len(before)
    assert page.evaluate("window.notReloaded") is True
    expect(message_box(page)).to_have_value("A draft that must stay.")
    limit_replies(page, 8)
    message_box(page).press("Enter")
    wait_for_replies(page, 2)


def test_a_reply_that_a_full_disk_does_not_take_stays_whole_and_is_saved_once_there_is_room(server, profile):
    page = open_page(profile(), server.url, max_tokens=200)
    send(page, "Tell me about ships.")
    wait_for_streaming(page)
    unsaved = page.locator("#chat .pt-note")
    with server.full_disk():
        wait_for_replies(page, 1)
        expect(unsaved).to_contain_text("not on disk yet")
        whole = last_reply(page)
        assert letters(whole) not in map(letters, server.stored_replies())
        page.reload()
        expect(unsaved).to_contain_text("not on disk yet")
        assert last_reply(page) == whole
        message_box(page).fill("And then?")
        message_box(page).press("Enter")
        expect(page.locator(".pt-notice")).to_contain_text("last reply of this chat is not on disk yet")
        expect(message_box(page)).to_have_value("And then?")
    expect(unsaved).to_have_count(0)  # without a click
    assert last_reply(page) == whole and letters(whole) in map(letters, server.stored_replies())
    message_box(page).press("Enter")
    wait_for_replies(page, 2)


def test_what_is_sent_without_a_network_is_kept_and_can_be_sent_later(server, profile, cable):
    page = open_page(profile(), cable.url)
    ask(page, "Hello.")
    cable.cut()
    message_box(page).fill("Are you there?")
    message_box(page).press("Enter")
    expect(page.get_by_text("cannot be reached").first).to_be_visible()
    expect(page.locator("#chat [data-testid=status-tracker]")).to_be_hidden()  # it would cover the chat
    expect(message_box(page)).to_have_value("Are you there?")
    cable.mend()
    expect(page.locator(".pt-state")).to_have_text("")
    message_box(page).press("Enter")
    wait_for_replies(page, 2)


def test_a_message_sent_while_the_stream_of_events_ends_is_answered(server, profile):
    page = open_page(profile(scripts=[late_events(1000, "close_stream")]), server.url)
    page.wait_for_timeout(1500)
    for number in range(1, 4):
        page.evaluate("pageturn.send('search', { text: '' })")
        page.wait_for_timeout(300)  # the server has ended the stream, and the page does not know
        send(page, f"Count to {number}.")
        wait_for_replies(page, number)


def test_a_page_back_on_a_network_reads_on_while_the_server_still_writes_to_its_old_connection(server, profile):
    page = open_page(profile(scripts=[DEAD_SOCKETS]), server.url, max_tokens=200)
    send(page, "Write a story about a lighthouse.")
    before = wait_for_streaming(page)
    page.evaluate("sockets.forEach((socket) => { socket.dead = true; }); window.dispatchEvent(new Event('online'))")
    assert int(wait_for_replies(page, 1)["out"]) > 0
    assert last_reply(page).startswith(before[:20])
    ask(page, "And about a ship?")


@pytest.mark.parametrize("first", [True, False], ids=["a first message", "a second message"])
def test_a_message_whose_answer_is_lost_shows_once_the_page_is_back_and_is_sent_once(server, profile, first):
    page = open_page(profile(scripts=[LOST_ANSWERS]), server.url)
    if not first:
        ask(page, "Hello.")
    page.evaluate("window.losing = true")
    with page.expect_response(re.compile("/queue/join")):
        message_box(page).fill("Are you there?")
        message_box(page).press("Enter")
    page.wait_for_timeout(1000)
    page.evaluate("window.losing = false; window.dispatchEvent(new Event('online'))")
    wait_for_replies(page, 1 if first else 2)
    expect(message_box(page)).to_have_value("")
    message_box(page).press("Enter")
    ask(page, "And now?")
    texts = ["Are you there?", "And now?"] if first else ["Hello.", "Are you there?", "And now?"]
    expect(page.locator("#chat .user")).to_have_text(texts)
    assert "chat=" in page.url and len(page.locator(".pt-chat").all()) == 1


def test_what_became_of_a_message_is_asked_for_where_another_update_stood_in_its_answer_s_place(server, profile):
    page = open_page(profile(), server.url)
    lose_one = "() => { const { noteSent } = pageturn; pageturn.noteSent = () => { pageturn.noteSent = noteSent; }; }"
    ask(page, "Hello.")
    page.evaluate(lose_one)
    message_box(page).fill("Are you there?")
    message_box(page).press("Enter")
    expect(message_box(page)).to_have_value("", timeout=15_000)
    wait_for_replies(page, 2)
    expect(page.locator(".pt-chat")).to_have_count(1)


def test_where_no_sockets_get_through_events_come_over_http_and_survive_a_change_of_network(server, profile):
    page = open_page(profile(scripts=[NO_SOCKETS]), server.url, max_tokens=200)
    send(page, "Write a story about a river.")
    before = wait_for_streaming(page)
    page.evaluate("window.dispatchEvent(new Event('online'))")
    wait_for_replies(page, 1)
    assert last_reply(page).startswith(before[:20])


def test_a_server_that_refuses_for_want_of_room_is_not_asked_again_and_again(server, profile):
    page = open_page(profile(), server.url)
    asked = []

    def refuse(route):
        asked.append(route.request.url)
        route.fulfill(status=503, content_type="application/json", body='{"detail": "4,000 pages are busy"}')

    page.route(re.compile("/queue/join"), refuse)
    message_box(page).fill("Is there room?")
    message_box(page).press("Enter")
    expect(page.get_by_text("busy").first).to_be_visible()
    page.wait_for_timeout(2000)
    assert len(asked) == 1
    page.unroute(re.compile("/queue/join"))
    page.evaluate("pageturn.send('resync', { why: 'ready' })")
    page.wait_for_timeout(1000)
    expect(message_box(page)).to_have_value("Is there room?")
    message_box(page).press("End")
    message_box(page).press_sequentially(" Please.")
    message_box(page).press("Enter")
    wait_for_replies(page, 1)
    expect(page.locator("#chat .user")).to_have_text("Is there room? Please.")


def test_the_server_restarts_under_open_tabs(own_server, profile):
    ask(open_page(profile(), own_server.url), "What is a crow?")  # a stranger, who has an owner's number before
    context = profile()
    page = open_page(context, own_server.url)
    ask(page, "What is an owl?")
    text = last_reply(page)
    page.evaluate(MARK)
    second, loading = context.new_page(), context.new_page()
    second.goto(page.url)
    wait_for_replies(second, 1)
    loading.goto(page.url)
    assert own_server.end() == 0
    expect(page.locator(".pt-state")).to_contain_text("Connection lost")
    own_server.start()
    expect(page.locator(".pt-state")).to_have_text("")
    expect(second.locator(".pt-state")).to_have_text("")
    assert last_reply(page) == text
    ask(page, "And a hawk?")
    expect(page.locator(".pt-events")).to_contain_text("this chat took")
    expect(page.locator(".pt-events")).not_to_contain_text("another")  # by the numbers of the server before
    for tab in (second, loading):
        wait_for_replies(tab, 2)
    assert page.evaluate("window.notReloaded") is True
    page.reload()
    expect(page.locator("#chat .user").first).to_have_text("What is an owl?")
    expect(replies(page)).to_have_count(2)
    expect(page.locator(".pt-chat")).to_have_count(1)


@pytest.mark.parametrize("how", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_a_server_that_ends_in_mid_reply_keeps_the_message_and_the_cut_reply(own_server, profile, how):
    page = open_page(profile(), own_server.url, max_tokens=2000)
    send(page, "Write a very long story about an island.")
    wait_for_streaming(page)
    page.wait_for_timeout(1500)  # partial text is stored every second
    page.evaluate(MARK)
    own_server.end(how)
    own_server.start()
    expect(replies(page)).to_contain_text("cut off")
    expect(page.locator("#chat .user")).to_have_text("Write a very long story about an island.")
    assert len(last_reply(page)) > 20
    assert page.evaluate("window.notReloaded") is True
    expect(page.locator("#stop")).to_be_hidden()
    kept = last_reply(page)
    page.reload()
    expect(replies(page)).to_contain_text("cut off")
    assert last_reply(page) == kept
    send(page, "Write a very long story about a desert.")
    wait_for_streaming(page)
    page.locator("#stop").click()
    wait_for_replies(page, 2)


def test_a_model_that_cannot_be_fetched_is_named_with_a_retry_and_the_draft_is_kept(profile, tmp_path):
    server = Server(tmp_path / "data", "--model", "no-such-owner-0/no-such-model-0")
    server.start(ready=False)
    try:
        page = open_page(profile(), server.url, max_tokens=None)
        expect(page.locator(".pt-state")).to_contain_text("no-such-model-0", timeout=60_000)
        expect(page.locator(".pt-retry")).to_be_visible()
        message_box(page).fill("Hello?")
        message_box(page).press("Enter")
        expect(page.locator(".pt-notice")).to_be_visible()
        expect(message_box(page)).to_have_value("Hello?")
        page.locator(".pt-retry").click()
        expect(page.locator(".pt-retry")).to_be_visible()
    finally:
        server.end()


@pytest.fixture
def loading(shallow_model_path, tmp_path):
    """(a server's address, a function after which it loads its model)"""
    argv = ("--model", str(shallow_model_path), "--num-kvcache-blocks", "512", "--device", "cpu")
    program = ("tests/support/faulty_app.py", "loading", str(tmp_path / "go"))
    with AppProcess(*argv, data_dir=tmp_path / "data", program=program) as app:
        app.wait_open()
        yield app.url, (tmp_path / "go").touch
        assert app.end() == 0


def test_what_is_sent_while_the_model_loads_is_answered_when_it_is_ready(loading, profile):
    url, load = loading
    late = late_events(1000)  # so that the message is sent before the page knows what it shows
    at_once, edited, hidden = (profile(scripts).new_page() for scripts in ([late], [], []))
    for page in (at_once, edited, hidden):
        page.goto(url)
        message_box(page).wait_for()
        message_box(page).fill("What is an owl?")
        message_box(page).press("Enter")
        expect(page.locator(".pt-notice")).to_contain_text("is answered when it is ready")
        expect(message_box(page)).to_have_value("What is an owl?")
    message_box(edited).fill("What is a hawk?")
    hidden.evaluate(
        "Object.defineProperty(document, 'hidden', { value: true });"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    load()
    for page, left in ((at_once, ""), (edited, "What is a hawk?"), (hidden, "")):
        wait_for_replies(page, 1)
        expect(page.locator("#chat .user")).to_have_text("What is an owl?")
        expect(message_box(page)).to_have_value(left)
        expect(page.locator(".pt-chat")).to_have_count(1)
    for page in (at_once, edited):
        expect(page.locator(".pt-notice")).to_be_hidden()
    ask(edited, "What is a hawk?")


def test_a_page_loaded_again_while_its_message_waits_for_the_model_has_it_answered_once(loading, profile):
    url, load = loading
    context = profile()
    page = open_page(context, url, max_tokens=None)
    message_box(page).fill("What is an owl?")
    message_box(page).press("Enter")
    expect(page.locator(".pt-notice")).to_contain_text("is answered when it is ready")
    page.reload()
    expect(message_box(page)).to_have_value("What is an owl?")
    expect(page.locator(".pt-notice")).to_contain_text("is answered when it is ready")
    load()
    wait_for_replies(page, 1)
    expect(page.locator("#chat .user")).to_have_text("What is an owl?")
    expect(message_box(page)).to_have_value("")
    expect(page.locator(".pt-chat")).to_have_count(1)


@pytest.fixture(scope="module")
def proxied(server_args, tmp_path_factory):
    """(a server, the page's address at a proxy before it): under a path, and replies that nobody watches end soon."""
    data = tmp_path_factory.mktemp("proxied") / "data"
    server = Server(data, *server_args, "--root-path", "/x", "--abandon-after", "2").start()
    cable = Cable(server.port, path="/x")
    yield server, f"{cable.url}/"
    cable.cut()
    server.end()


def test_the_page_works_under_a_path_of_a_proxy(proxied, profile):
    _, url = proxied
    context, asked = profile(), []
    context.on("request", lambda request: asked.append(request.url))
    context.on("page", lambda page: page.on("websocket", lambda socket: asked.append(socket.url)))
    page = open_page(context, url)
    assert int(ask(page, "Hello.")["out"]) > 0
    assert asked and all(one.partition("://")[2].startswith(url.partition("://")[2]) for one in asked)
    expect(page.locator(".pt-legend .pt-cached + span")).not_to_have_text("cached 0")


def test_a_login_is_the_identity_and_guards_page_and_sockets(server_args, profile, tmp_path):
    server = Server(tmp_path / "data", *server_args, "--auth", "ada:secret word").start()

    def log_in(page):
        page.get_by_label("username").fill("ada")
        page.get_by_label("password").fill("secret word")
        page.get_by_role("button", name="Login").click()
        expect(page.locator(".pt-chats li").first).to_be_attached()

    try:
        for count in (1, 2):  # another browser, the same person
            page = profile().new_page()
            page.goto(server.url)
            log_in(page)
            limit_replies(page, 4)
            ask(page, "Who am I?")
            expect(page.locator(".pt-legend .pt-cached + span")).not_to_have_text("cached 0")
            expect(page.locator(".pt-chat")).to_have_count(count)
        # A server that starts anew knows no login: an open tab asks for it, by itself, and keeps what was typed.
        message_box(page).fill("And who are you?")
        server.end()
        server.start()
        log_in(page)
        expect(message_box(page)).to_have_value("And who are you?")
        expect(replies(page)).to_have_count(1)
    finally:
        server.end()


def test_a_reply_that_nobody_watches_any_more_ends_where_the_server_is_told_so(proxied, profile):
    server, url = proxied
    context = profile()
    page, second = open_page(context, url, max_tokens=2000), context.new_page()
    open_settings(page)
    page.locator("#temperature input[type=number]").fill("0")  # at which the model tells this for ever
    send(page, "Write a very long story about a desert.")
    wait_for_streaming(page)
    address = page.url
    page.wait_for_timeout(3000)
    assert server.health()["running"] == 1  # watched
    page.close()
    server.wait(lambda health: health["running"] == 0, seconds=20)
    second.goto(address)
    expect(replies(second)).to_contain_text("nobody was watching")
