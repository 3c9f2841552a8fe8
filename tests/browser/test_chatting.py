"""One person chats: first turn, second turn, edit, regenerate, continue, stop, delete, find, carry away."""

from __future__ import annotations

import json
import re
import time

import pytest
from playwright.sync_api import expect

from chatting import (
    ask,
    chat_id,
    last_reply,
    limit_replies,
    message_box,
    open_page,
    replies,
    send,
    titles,
    wait_for_replies,
    wait_for_streaming,
)

pytestmark = pytest.mark.browser


def test_the_first_chat_answers_and_stays_after_a_reload(server, profile):
    page = open_page(profile(), server.url)
    figures = ask(page, "Name three colours.")
    assert figures["cached"] != figures["prompt"] and int(figures["out"]) == 16
    text, line, chat = last_reply(page), replies(page).inner_text(), chat_id(page)
    assert text
    assert titles(page) == ["Name three colours."]

    page.reload()
    expect(replies(page)).to_have_text(line)
    assert last_reply(page) == text
    assert chat_id(page) == chat
    expect(page.locator("#chat .user")).to_have_text("Name three colours.")


def test_the_second_turn_reuses_the_first_ones_blocks_and_the_strip_shows_it(server, profile):
    page = open_page(profile(), server.url)
    first = ask(page, "Tell me something about the sea.")
    second = ask(page, "And about rivers?")
    # Every full block whose KV was computed: the last sampled token has none yet.
    whole = (int(first["prompt"]) + int(first["out"]) - 1) // 16 * 16
    assert int(second["cached"].replace(",", "")) == whole > 0
    expect(page.locator(".pt-strip .pt-reused")).to_have_count(whole // 16)
    expect(page.locator(".pt-strip .pt-computed")).not_to_have_count(0)
    expect(page.locator(".pt-events")).to_contain_text(f"turn 2: reused {whole // 16} of")
    expect(page.locator("[data-k=ttft-note]")).to_have_text(f"cached {whole} / {second['prompt']} prompt tokens")


def test_the_panel_counts_the_blocks_as_the_engine_does(server, profile):
    page = open_page(profile(), server.url)
    ask(page, "Count to five.")
    expect(page.locator(".pt-legend .pt-free + span")).to_have_text(f"free {server.health()['kv']['free']:,}")
    expect(page.locator(".pt-legend .pt-cached + span")).to_have_text(f"cached {server.health()['kv']['cached']:,}")
    assert server.health()["kv"]["total"] == 1024
    page.locator(".pt-grid").hover(position={"x": 3, "y": 3})
    expect(page.locator(".pt-tip")).to_have_text(re.compile(r"^#0 · \w+"))


def test_editing_and_regenerating_keep_the_old_branches(server, profile):
    page = open_page(profile(), server.url)
    ask(page, "Say a word about cats.")
    cats = last_reply(page)

    page.get_by_label("Edit").first.click()
    page.locator("#chat .user textarea").fill("Say a word about dogs.")
    page.get_by_label("Submit").click()
    expect(page.locator("#chat .user")).to_have_text("Say a word about dogs.")
    expect(page.locator("#chat .pt-links")).to_contain_text("message 2/2")
    wait_for_replies(page, 1)

    page.get_by_title("earlier message").click()
    expect(page.locator("#chat .user")).to_have_text("Say a word about cats.")
    assert last_reply(page) == cats

    page.get_by_role("button", name="Retry").click()
    expect(page.locator("#chat .pt-links")).to_contain_text("reply 2/2")
    page.locator("#chat").get_by_text("Regenerate").click()
    expect(page.locator("#chat .pt-links")).to_contain_text("reply 3/3")
    page.reload()
    expect(page.locator("#chat .pt-links")).to_contain_text("message 1/2")
    expect(page.locator("#chat .pt-links")).to_contain_text("reply 3/3")


def test_stop_frees_the_engine_at_once_and_continue_goes_on(server, profile):
    page = open_page(profile(), server.url, max_tokens=400)
    send(page, "Write a very long story about a lighthouse.")
    wait_for_streaming(page)
    with page.expect_request("**/gradio_api/**"):
        page.locator("#stop").click()
    asked = time.monotonic()
    server.wait(lambda health: health["running"] == 0, seconds=5)
    assert time.monotonic() - asked < 0.5
    figures = wait_for_replies(page, 1)
    assert figures["finish"] == "stopped"
    expect(page.locator("#stop")).to_be_hidden()
    kept = last_reply(page)
    page.reload()
    expect(replies(page)).to_have_count(1)
    assert last_reply(page) == kept != ""

    limit_replies(page, 8)
    page.locator("#chat").get_by_text("Continue").click()
    expect(page.locator("#chat .pt-figures")).to_contain_text("length limit")
    assert last_reply(page).startswith(kept.rstrip()) and len(last_reply(page)) > len(kept)


def test_escape_stops_and_the_keys_open_a_new_chat_and_the_search(server, profile):
    page = open_page(profile(), server.url, max_tokens=400)
    send(page, "Write a very long story about a mountain.")
    wait_for_streaming(page)
    page.keyboard.press("Escape")
    assert wait_for_replies(page, 1)["finish"] == "stopped"
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("#chat .user")).to_have_count(0)
    assert "chat=" not in page.url
    page.keyboard.press("Control+k")
    expect(page.locator(".pt-search")).to_be_focused()


def test_a_deleted_chat_is_gone_for_good(server, profile):
    context = profile()
    page = open_page(context, server.url)
    ask(page, "A secret about zebras.")
    address = page.url
    page.locator(".pt-chat").hover()
    page.locator(".pt-delete").click()
    page.locator(".pt-yes").click()
    expect(page.locator(".pt-none")).to_be_visible()
    expect(page.locator("#chat .user")).to_have_count(0)
    page.goto(address)
    expect(page.locator(".pt-notice")).to_contain_text("does not exist")
    page.locator(".pt-search").fill("zebras")
    expect(page.locator(".pt-none")).to_have_text("Nothing found")


def test_chats_are_renamed_and_found_by_title_and_text(server, profile):
    page = open_page(profile(), server.url, max_tokens=4)
    ask(page, "The word is aubergine.")
    page.locator(".pt-chat").hover()
    page.locator(".pt-rename").click()
    page.locator(".pt-newname").fill("Vegetables ${7*7} `x` <b>bold</b>")
    page.keyboard.press("Enter")
    expect(page.locator(".pt-title")).to_have_text("Vegetables ${7*7} `x` <b>bold</b>")
    page.locator("#new-chat").click()
    send(page, "Something else altogether.")  # before the page shows the new chat: it must not land in the old one
    expect(page.locator("#chat .user")).to_have_text("Something else altogether.")
    expect(page.locator(".pt-chat")).to_have_count(2)
    for words, found in (("AUBERGINE", 1), ("vegetables", 1), ("100%", 0), ("", 2)):
        page.locator(".pt-search").fill(words)
        expect(page.locator(".pt-chat")).to_have_count(found)


def test_an_exported_chat_is_imported_by_another_person(server, profile, tmp_path):
    page = open_page(profile(), server.url)
    ask(page, "What is a kilometre?")
    with page.expect_download() as saved:
        page.locator(".pt-export").click()
    file = tmp_path / "chat.json"
    saved.value.save_as(file)
    assert "kilometre" in json.dumps(json.loads(file.read_text()))

    other = open_page(profile(), server.url)
    other.locator(".pt-files input").set_input_files(file)
    expect(other.locator("#chat .user")).to_have_text("What is a kilometre?")
    assert last_reply(other) == last_reply(page)
    file.write_text("no JSON")
    other.locator(".pt-files input").set_input_files(file)
    expect(other.locator(".pt-notice")).to_contain_text("not JSON")


def test_a_first_message_clicked_twice_or_followed_at_once_makes_one_chat(server, profile):
    page = open_page(profile(), server.url)
    message_box(page).fill("Name two rivers.")
    page.locator("#message button").last.dblclick()
    wait_for_replies(page, 1)
    page.wait_for_timeout(500)
    assert titles(page) == ["Name two rivers."]
    expect(page.locator("#chat .user")).to_have_count(1)

    page.locator("#new-chat").click()
    expect(replies(page)).to_have_count(0)
    send(page, "Name two lakes.")
    message_box(page).fill("And two seas.")  # the first chat's name has hardly reached the page
    message_box(page).press("Enter")
    wait_for_replies(page, 1)
    expect(message_box(page)).to_have_value("And two seas.")  # refused while that chat answers, and kept
    assert sorted(titles(page)) == ["Name two lakes.", "Name two rivers."]


def test_settings_belong_to_a_chat_and_are_kept(server, profile):
    page = open_page(profile(), server.url, max_tokens=5)
    ask(page, "One.")
    page.locator("#settings > button").click()
    page.locator("#temperature input[type=number]").fill("1.5")
    page.locator("#seed textarea, #seed input").fill("7")
    page.locator("#system-prompt textarea").fill("You are a pirate.")
    expect(page.locator(".pt-notice")).to_be_hidden()
    assert int(ask(page, "Two.")["out"]) == 5
    page.locator("#new-chat").click()
    expect(page.locator("#temperature input[type=number]")).to_have_value("0.2")
    page.locator(".pt-pick").click()
    expect(page.locator("#temperature input[type=number]")).to_have_value("1.5")
    page.reload()
    page.locator("#settings > button").click()
    expect(page.locator("#temperature input[type=number]")).to_have_value("1.5")
    expect(page.locator("#seed textarea, #seed input")).to_have_value("7")
    expect(page.locator("#max-tokens textarea, #max-tokens input")).to_have_value("5")
    expect(page.locator("#system-prompt textarea")).to_have_value("You are a pirate.")


@pytest.mark.parametrize(
    ("box", "value", "words"),
    [
        ("#max-tokens", "0", "max_tokens=0"),
        ("#seed", "-3", "seed=-3"),
        ("#top-k", "-5", "top_k=-5"),
        ("#top-p", "7", "top_p=7"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_and_the_draft_kept(server, profile, box, value, words):
    page = open_page(profile(), server.url, max_tokens=None)
    page.locator("#settings > button").click()
    expect(page.locator("#temperature input[type=number]")).to_have_value("0.2")  # the server has filled the form
    page.locator(f"{box} textarea, {box} input").first.fill(value)
    message_box(page).fill("Hello")
    message_box(page).press("Enter")
    expect(page.locator(".pt-notice")).to_contain_text(words)
    expect(message_box(page)).to_have_value("Hello")
    expect(page.locator(".pt-none")).to_be_visible()


def test_a_blank_message_does_nothing(server, profile):
    page = open_page(profile(), server.url)
    message_box(page).fill("  \t ")
    message_box(page).press("Enter")
    message_box(page).fill("Now a real one.")
    message_box(page).press("Enter")
    wait_for_replies(page, 1)
    expect(page.locator("#chat .user")).to_have_count(1)


def test_a_message_longer_than_the_context_is_refused_with_both_numbers_and_kept(server, profile):
    page = open_page(profile(), server.url)
    text = "word " * 9000
    message_box(page).fill(text)
    message_box(page).press("Enter")
    notice = page.locator(".pt-notice")
    expect(notice).to_contain_text("8,192")
    assert re.search(r"9,0\d\d", notice.inner_text())
    expect(message_box(page)).to_have_value(text)
    assert titles(page) == []


def test_a_long_prefill_shows_its_progress_within_a_second(server, profile):
    page = open_page(profile(), server.url, max_tokens=2)
    message_box(page).fill("Summarise: " + "the quick brown fox jumps over the lazy dog " * 500)
    message_box(page).press("Enter")
    sent = time.monotonic()
    expect(page.locator("#chat .pt-pending")).to_have_text(re.compile(r"prefill [\d,]+ / [4-6],\d{3}"))
    assert time.monotonic() - sent < 3  # a second on a machine that is not busy
    wait_for_replies(page, 1)
