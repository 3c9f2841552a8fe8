"""Several chats, several people, several tabs at the same time."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from chatting import (
    ask,
    chat_id,
    last_reply,
    open_page,
    replies,
    send,
    titles,
    wait_for_replies,
    wait_for_streaming,
)

pytestmark = pytest.mark.browser


def test_two_chats_stream_at_once_and_nothing_is_mixed(server, profile):
    page = open_page(profile(), server.url, max_tokens=300)
    send(page, "Write a long story about apples.")
    wait_for_streaming(page)
    apples = chat_id(page)
    page.locator("#new-chat").click()
    expect(page.locator("#chat .user")).to_have_count(0)
    expect(page.locator("#stop")).to_be_hidden()
    send(page, "Write a long story about submarines.")
    wait_for_streaming(page)
    assert server.health()["running"] >= 2

    page.locator(f".pt-chat[data-id='{apples}'] .pt-pick").click()
    expect(page.locator("#chat .user")).to_have_text("Write a long story about apples.")
    page.locator("#stop").click()
    wait_for_replies(page, 1)
    expect(page.locator("#chat .user")).to_have_text("Write a long story about apples.")
    about_apples = last_reply(page)
    page.locator(".pt-chat:not(.pt-open) .pt-pick").click()
    expect(page.locator("#chat .user")).to_have_text("Write a long story about submarines.")
    page.locator("#stop").click()
    wait_for_replies(page, 1)
    assert last_reply(page) != about_apples
    page.go_back()
    expect(page.locator("#chat .user")).to_have_text("Write a long story about apples.")
    assert last_reply(page) == about_apples


def test_two_people_stream_at_once_and_never_see_each_other(server, profile):
    ada, bob = open_page(profile(), server.url, 300), open_page(profile(), server.url, 300)
    send(ada, "Write a long story about violins.")
    send(bob, "Write a long story about tractors.")
    wait_for_streaming(ada)
    wait_for_streaming(bob)
    assert server.health()["running"] >= 2
    for person in (ada, bob):
        person.locator("#stop").click()
        wait_for_replies(person, 1)
    assert titles(ada) == ["Write a long story about violins."]
    assert titles(bob) == ["Write a long story about tractors."]
    bob.goto(f"{server.url}/?chat={chat_id(ada)}")
    expect(bob.locator(".pt-notice")).to_contain_text("does not exist")
    expect(bob.locator("#chat .user")).to_have_count(0)
    assert "violins" not in bob.content()
    bob.locator(".pt-search").fill("violins")
    expect(bob.locator(".pt-none")).to_have_text("Nothing found")


def test_eight_tabs_load_and_send_and_are_all_the_same_person(server, profile):
    """More tabs than a browser opens connections for: a held stream each would leave none for the seventh."""
    context = profile()
    tabs = [open_page(context, server.url, max_tokens=24) for _ in range(8)]
    for n, tab in enumerate(tabs):
        send(tab, f"Question {n} of eight.")
    for tab in tabs:
        wait_for_replies(tab, 1)
    tabs[0].reload()
    expect(tabs[0].locator(".pt-chat")).to_have_count(8)
    assert sorted(titles(tabs[0])) == [f"Question {n} of eight." for n in range(8)]


def test_stop_works_while_eight_tabs_stream(server, profile):
    context = profile()
    tabs = [open_page(context, server.url, max_tokens=600) for _ in range(8)]
    for tab in tabs:
        send(tab, "Write a long story about the sea.")
    for tab in tabs:
        wait_for_streaming(tab, 1)
    for tab in tabs:
        tab.locator("#stop").click()
    for tab in tabs:
        assert wait_for_replies(tab, 1)["finish"] == "stopped"


def test_a_second_message_to_an_answering_chat_is_refused_and_kept(server, profile):
    context = profile()
    page = open_page(context, server.url, max_tokens=200)
    send(page, "Tell me a story.")
    wait_for_streaming(page)
    page.locator("#message textarea").fill("And another one.")
    page.locator("#message textarea").press("Enter")
    expect(page.locator(".pt-notice")).to_be_visible()
    expect(page.locator("#message textarea")).to_have_value("And another one.")
    page.locator("#stop").click()
    wait_for_replies(page, 1)
    page.locator("#message textarea").press("Enter")
    expect(page.locator("#chat .user")).to_have_count(2)


def test_a_second_tab_shows_the_same_chat_while_it_streams(server, profile):
    context = profile()
    page = open_page(context, server.url, max_tokens=300)
    send(page, "Write a long story about the moon.")
    wait_for_streaming(page)
    second = context.new_page()
    second.goto(page.url)
    wait_for_streaming(second)
    second.locator("#stop").click()
    wait_for_replies(second, 1)
    wait_for_replies(page, 1)
    assert last_reply(second) == last_reply(page)
    assert replies(second).inner_text() == replies(page).inner_text()
    ask(second, "And the sun?")
