"""Several chats, several people, several tabs at the same time."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from chatting import (
    ask,
    chat_id,
    last_reply,
    limit_replies,
    message_box,
    open_page,
    open_settings,
    replies,
    send,
    titles,
    wait_for_replies,
    wait_for_streaming,
)

pytestmark = pytest.mark.browser


def test_two_chats_stream_at_once_and_nothing_is_mixed(server, profile):
    page = open_page(profile(), server.url, max_tokens=2000)
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


@pytest.mark.long
def test_eight_tabs_stream_and_can_be_stopped_and_are_all_the_same_person(server, profile):
    """More tabs than a browser opens connections for: a held stream each would leave none for the seventh."""
    context = profile()
    tabs = [open_page(context, server.url, max_tokens=2000) for _ in range(8)]
    for tab in tabs:
        send(tab, "Write a long story about the sea.")
    for tab in tabs:
        wait_for_streaming(tab, 1)
    for tab in tabs:
        tab.locator("#stop").click()
    for tab in tabs:
        assert wait_for_replies(tab, 1)["finish"] == "stopped"
    limit_replies(tabs[7], 8)
    ask(tabs[7], "And of a lake?")
    tabs[0].reload()
    expect(tabs[0].locator(".pt-chat")).to_have_count(8)
    assert titles(tabs[0]) == ["Write a long story about the sea."] * 8


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
    page = open_page(context, server.url, max_tokens=2000)
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
    limit_replies(second, 8)
    ask(second, "And the sun?")


def two_tabs(context, url):
    """Of one person, who reads the same chat in both: a question and its answer."""
    page = open_page(context, url, max_tokens=8)
    ask(page, "Name a colour.")
    second = context.new_page()
    second.goto(page.url)
    wait_for_replies(second, 1)
    return page, second


def test_a_tab_that_is_read_shows_what_is_asked_in_another_and_only_then(server, profile):
    page, second = two_tabs(profile(), server.url)
    message_box(second).fill("half a thought")
    for tab in (page, second):
        tab.evaluate(
            "() => { const { send } = pageturn; window.asked = [];"
            " pageturn.send = (...words) => { window.asked.push(words[0]); send(...words); }; }"
        )
    ask(page, "And another one.")
    wait_for_replies(second, 2)
    assert last_reply(second) == last_reply(page)
    expect(message_box(second)).to_have_value("half a thought")
    ask(second, "And a third.")
    wait_for_replies(page, 3)
    page.wait_for_timeout(1500)
    assert [tab.evaluate("asked").count("resync") for tab in (page, second)] == [1, 1]


def test_a_tab_back_in_view_shows_the_branch_that_another_one_has_turned_to(server, profile):
    """By the list of chats, where what happened to blocks meanwhile did not reach it."""
    deaf = "{ set onmessage(f) { if (!/kv/.test(this.url)) super.onmessage = f; } }"
    context = profile([f"window.WebSocket = class extends WebSocket {deaf};"])
    page, second = two_tabs(context, server.url)
    page.get_by_role("link", name="Regenerate").click()
    expect(page.locator("#chat .pt-links")).to_contain_text("reply 2/2")
    wait_for_replies(page, 1)
    expect(second.locator("#chat .pt-links")).not_to_contain_text("reply")
    second.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(second.locator("#chat .pt-links")).to_contain_text("reply 2/2")
    assert last_reply(second) == last_reply(page)


def test_what_is_set_in_one_tab_holds_for_what_is_sent_in_another(server, profile):
    page, second = two_tabs(profile(), server.url)
    with page.expect_response(lambda answer: "/queue/join" in answer.url):
        limit_replies(page, 4)
    page.wait_for_timeout(1000)  # it is kept
    assert int(ask(second, "Tell a long story of a sound.")["out"]) == 4
    limit_replies(second, 6)
    assert int(ask(second, "Tell a long story of a taste.")["out"]) == 6
    second.locator("#chat").get_by_text("Regenerate").last.click()
    expect(second.locator("#chat .pt-links").last).to_contain_text("reply 2/2")
    assert int(wait_for_replies(second, 3)["out"]) == 6


def test_a_chat_that_was_deleted_in_another_tab_leaves_one_that_comes_back_in_view(server, profile):
    page, second = two_tabs(profile(), server.url)
    page.locator(".pt-chat").hover()
    page.locator(".pt-delete").click()
    page.locator(".pt-yes").click()
    expect(page.locator("#chat .user")).to_have_count(0)
    second.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(second.locator(".pt-notice")).to_contain_text("does not exist here")
    expect(second.locator("#chat .user")).to_have_count(0)
    assert "chat=" not in second.url
    limit_replies(second, 8)
    ask(second, "Another one.")


def test_a_message_follows_the_branch_that_its_tab_shows(server, profile):
    """Nothing tells a tab in view that another one has turned to another branch."""
    page, second = two_tabs(profile(), server.url)
    page.locator("#chat").get_by_text("Regenerate").click()
    expect(page.locator("#chat .pt-links")).to_contain_text("reply 2/2")
    wait_for_replies(page, 1)
    expect(second.locator("#chat .pt-links")).to_contain_text("reply 2/2")
    wait_for_replies(second, 1)
    second.get_by_title("earlier reply").click()
    expect(second.locator("#chat .pt-links")).to_contain_text("reply 1/2")
    ask(page, "And what colour is it?")
    expect(page.locator("#chat .pt-links").first).to_contain_text("reply 2/2")
    page.reload()
    expect(page.locator("#chat .pt-links").first).to_contain_text("reply 2/2")
    expect(replies(page)).to_have_count(2)


def test_what_is_edited_set_and_said_in_a_tab_stays_when_its_chat_goes_on_in_another(server, profile):
    page, second = two_tabs(profile(), server.url)
    open_settings(second)
    limit = second.locator("#max-tokens textarea, #max-tokens input")
    limit.fill("-5")
    limit.blur()
    expect(second.locator(".pt-notice")).to_contain_text("-5")
    second.get_by_label("Edit").first.click()
    editor = second.locator("#chat textarea")
    editor.fill("Name a smell.")
    ask(page, "And another one.")
    page.wait_for_timeout(1500)
    expect(replies(second)).to_have_count(1)
    expect(editor).to_have_value("Name a smell.")
    second.get_by_label("Cancel").first.click()
    wait_for_replies(second, 2)
    expect(limit).to_have_value("-5")
    expect(second.locator(".pt-notice")).to_contain_text("-5")
