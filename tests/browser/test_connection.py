"""Reloads, lost networks, servers that end: the page only watches, so nothing of a chat is lost by any of them."""

from __future__ import annotations

import signal

import pytest
from playwright.sync_api import expect

from chatting import (
    ask,
    last_reply,
    limit_replies,
    message_box,
    open_page,
    replies,
    send,
    wait_for_replies,
    wait_for_streaming,
)
from server_process import Cable, Server

pytestmark = pytest.mark.browser

MARK = "window.notReloaded = true"


def test_a_reload_in_mid_stream_attaches_again_and_the_text_is_whole(server, profile):
    page = open_page(profile(), server.url, max_tokens=100)
    send(page, "Tell me about bridges.")
    before = wait_for_streaming(page)
    page.reload()
    after = wait_for_streaming(page)
    assert after.startswith(before[:20])
    assert int(wait_for_replies(page, 1)["out"]) > 0
    assert last_reply(page).startswith(before[:20])
    page.locator("#settings > button").click()
    expect(page.locator("#max-tokens textarea, #max-tokens input")).to_have_value("100")


def test_a_network_lost_for_three_seconds_is_caught_up_without_a_reload(server, profile, cable):
    page = open_page(profile(), cable.url, max_tokens=200)
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


def test_what_is_sent_without_a_network_is_kept_and_can_be_sent_later(server, profile, cable):
    page = open_page(profile(), cable.url)
    ask(page, "Hello.")
    cable.cut()
    message_box(page).fill("Are you there?")
    message_box(page).press("Enter")
    expect(page.get_by_text("cannot be reached").first).to_be_visible()
    expect(message_box(page)).to_have_value("Are you there?")
    cable.mend()
    expect(page.locator(".pt-state")).to_have_text("")
    message_box(page).press("Enter")
    wait_for_replies(page, 2)


def test_the_server_restarts_under_an_open_tab(own_server, profile):
    page = open_page(profile(), own_server.url)
    ask(page, "What is an owl?")
    text = last_reply(page)
    page.evaluate(MARK)
    assert own_server.end() == 0
    expect(page.locator(".pt-state")).to_contain_text("Connection lost")
    own_server.start()
    expect(page.locator(".pt-state")).to_have_text("")
    assert last_reply(page) == text
    ask(page, "And a hawk?")
    assert page.evaluate("window.notReloaded") is True
    page.reload()
    expect(page.locator("#chat .user").first).to_have_text("What is an owl?")
    expect(replies(page)).to_have_count(2)
    expect(page.locator(".pt-chat")).to_have_count(1)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
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
    send(page, "Go on, then.")
    wait_for_streaming(page)


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


def test_the_page_works_under_a_path_of_a_proxy(server_args, profile, tmp_path):
    server = Server(tmp_path / "data", *server_args, "--root-path", "/x").start()
    cable = Cable(server.port, path="/x")
    try:
        page = open_page(profile(), f"{cable.url}/")
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("websocket", lambda socket: asked.append(socket.url))
        assert int(ask(page, "Hello.")["out"]) > 0
        assert asked and all(f":{cable.port}/x/" in url for url in asked)
        expect(page.locator(".pt-legend .pt-cached + span")).not_to_have_text("cached 0")
    finally:
        cable.cut()
        server.end()


def test_a_login_is_the_identity_and_guards_page_and_sockets(server_args, profile, tmp_path):
    server = Server(tmp_path / "data", *server_args, "--auth", "ada:secret word").start()
    try:
        for _ in range(2):  # another browser, the same person
            context = profile()
            page = context.new_page()
            page.goto(server.url)
            page.get_by_label("username").fill("ada")
            page.get_by_label("password").fill("secret word")
            page.get_by_role("button", name="Login").click()
            expect(page.locator(".pt-chats li").first).to_be_attached()
            limit_replies(page, 8)
            ask(page, "Who am I?")
            expect(page.locator(".pt-legend .pt-cached + span")).not_to_have_text("cached 0")
        expect(page.locator(".pt-chat")).to_have_count(2)
    finally:
        server.end()


def test_a_reply_that_nobody_watches_any_more_ends_where_the_server_is_told_so(server_args, profile, tmp_path):
    server = Server(tmp_path / "data", *server_args, "--abandon-after", "2").start()
    try:
        context = profile()
        page, second = open_page(context, server.url, max_tokens=2000), context.new_page()
        send(page, "Write a very long story about a desert.")
        wait_for_streaming(page)
        address = page.url
        page.wait_for_timeout(3000)
        assert server.health()["running"] == 1  # watched
        page.close()
        server.wait(lambda health: health["running"] == 0, seconds=20)
        second.goto(address)
        expect(replies(second)).to_contain_text("nobody was watching")
    finally:
        server.end()
