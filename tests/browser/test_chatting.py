"""One person chats: first turn, second turn, edit, regenerate, continue, stop, delete, find, carry away."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from chatting import (
    ask,
    chat_id,
    last_reply,
    late_events,
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


def test_the_first_chat_answers_and_stays_after_a_reload(server, profile):
    page = open_page(profile(), server.url)
    figures = ask(page, "Tell a long story of three colours.")
    assert figures["cached"] != figures["prompt"] and int(figures["out"]) == 8
    text, line, chat = last_reply(page), replies(page).inner_text(), chat_id(page)
    assert text
    assert titles(page) == ["Tell a long story of three colours."]

    page.reload()
    expect(replies(page)).to_have_text(line)
    assert last_reply(page) == text
    assert chat_id(page) == chat
    expect(page.locator("#chat .user")).to_have_text("Tell a long story of three colours.")


def test_what_was_set_for_a_new_chat_survives_refreshes_of_the_page_s_state(server, profile):
    page = open_page(profile(), server.url)
    for why in ("ready", "back"):
        with page.expect_response(lambda answer: "/queue/join" in answer.url):
            page.evaluate("(why) => pageturn.send('resync', { why })", why)
        page.wait_for_timeout(1000)  # what it changes nothing of shows no sign of having come
    assert int(ask(page, "Tell a long story of four fish.")["out"]) == 8


def test_what_is_typed_right_after_the_settings_are_unfolded_stays(server, profile):
    """Also where the browser takes long to draw them: Gradio's own accordion sets its controls anew after that."""
    slow = "const frame = requestAnimationFrame; window.requestAnimationFrame = (f) => setTimeout(() => frame(f), 500)"
    page = open_page(profile(scripts=[slow]), server.url, max_tokens=None)
    page.get_by_role("button", name="Settings of this chat").click()
    box = page.locator("#max-tokens textarea, #max-tokens input")
    box.fill("8")
    page.wait_for_timeout(1500)
    expect(box).to_have_value("8")
    assert int(ask(page, "Tell a long story of three trees.")["out"]) == 8


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
    # However short the chat: how fast prompts are was measured before the first.
    expect(page.locator(".pt-events")).to_contain_text("without the cache (estimate)")
    expect(page.locator("[data-k=ttft-note]")).to_have_text(f"cached {whole} / {second['prompt']} prompt tokens")


def test_the_panel_counts_the_blocks_as_the_engine_does(server, profile):
    page = open_page(profile(), server.url)
    ask(page, "Count to five.")
    expect(page.locator(".pt-legend .pt-free + span")).to_have_text(f"free {server.health()['kv']['free']:,}")
    expect(page.locator(".pt-legend .pt-cached + span")).to_have_text(f"cached {server.health()['kv']['cached']:,}")
    assert server.health()["kv"]["total"] == 1024
    page.locator(".pt-grid").hover(position={"x": 3, "y": 3})
    expect(page.locator(".pt-tip")).to_have_text(re.compile(r"^#0 · \w+"))


LATE_ANSWER = late_events(500, '"sent":[{]"')  # to a message that was sent, after those to later events


@pytest.mark.parametrize(
    "scripts",
    [pytest.param([], marks=pytest.mark.long), [LATE_ANSWER]],
    ids=["as it is", "with a late answer"],
)
def test_turning_to_another_chat_right_after_sending_stays_there_and_the_message_is_sent(server, profile, scripts):
    page = open_page(profile(scripts=scripts), server.url)
    ask(page, "The first chat.")
    page.locator("#new-chat").click()
    expect(page.locator("#chat .user")).to_have_count(0)
    for text in ("The second chat.", "The third chat."):
        message_box(page).fill(text)
        with page.expect_request(re.compile("/queue/join")):
            message_box(page).press("Enter")
        page.locator("#new-chat").dispatch_event("click")  # at once
        if scripts:
            page.wait_for_timeout(1000)
        expect(page.locator(".pt-chats .pt-title").first).to_have_text(text)
        expect(message_box(page)).to_have_value("")
        expect(page.locator("#chat .user")).to_have_count(0)
        assert "chat=" not in page.url
    page.get_by_title("The second chat.", exact=True).click()
    expect(page.locator("#chat .user")).to_have_text("The second chat.")
    expect(message_box(page)).to_have_value("")
    page.keyboard.press("Escape")  # the reply's length is not what this is about
    wait_for_replies(page, 1)


def test_what_is_typed_before_the_server_has_taken_a_message_is_the_next_one(server, profile):
    page = open_page(profile(scripts=[LATE_ANSWER]), server.url)
    for number, text in enumerate(("Name a bird.", "Name a tree."), 1):
        message_box(page).fill(text)
        message_box(page).press("Enter")
        message_box(page).press_sequentially("Another.")
        expect(message_box(page)).to_have_value("Another.")
        wait_for_replies(page, number)
        expect(page.locator("#chat .user").last).to_have_text(text)
    page.reload()  # it is the draft of this chat
    expect(message_box(page)).to_have_value("Another.")


def test_every_chat_has_its_draft_and_going_back_twice_ends_where_it_should(server, profile):
    page = open_page(profile(scripts=[late_events(500)]), server.url, max_tokens=None)
    box, ids = message_box(page), []
    for text in ("Chat A.", "Chat B.", "Chat C."):
        page.locator("#new-chat").click()
        expect(page.locator("#chat .user")).to_have_count(0)
        expect(box).to_have_value("")
        send(page, text)
        page.keyboard.press("Escape")  # the reply's length is not what this is about
        wait_for_replies(page, 1)
        ids.append(chat_id(page))
        box.fill(f"draft of {text}")
    page.locator("#new-chat").click()
    assert box.input_value() == ""  # at once, before the server has answered
    box.fill("of the new one")
    page.get_by_title("Chat A.", exact=True).click()
    assert box.input_value() == "draft of Chat A." and chat_id(page) == ids[0]
    page.get_by_title("Chat B.", exact=True).click()
    assert box.input_value() == "draft of Chat B." and chat_id(page) == ids[1]
    page.go_back()
    page.go_back()
    assert box.input_value() == "of the new one"
    expect(page.locator("#chat .user")).to_have_count(0)
    page.wait_for_timeout(1500)
    assert "chat=" not in page.url and box.input_value() == "of the new one"
    expect(page.locator("#chat .user")).to_have_count(0)
    page.go_forward()
    expect(page.locator("#chat .user")).to_have_text("Chat A.")
    assert box.input_value() == "draft of Chat A." and chat_id(page) == ids[0]


def test_a_copy_of_a_tab_without_a_chat_makes_a_chat_of_its_own(server, profile):
    page = open_page(profile(), server.url)
    message_box(page).fill("From the first tab.")
    with page.expect_popup() as opened:
        page.evaluate("window.open(location.href)")  # with what the session has stored
    copy = opened.value
    expect(message_box(copy)).to_have_value("From the first tab.")
    expect(copy.locator(".pt-chats li").first).to_be_attached()
    limit_replies(copy, 8)
    ask(copy, "From the copy.")
    message_box(page).press("Enter")
    wait_for_replies(page, 1)
    expect(page.locator("#chat .user")).to_have_text("From the first tab.")
    expect(copy.locator("#chat .user")).to_have_text("From the copy.")
    assert chat_id(page) != chat_id(copy)


def test_a_chat_that_is_deleted_in_another_tab_while_it_answers_leaves_the_page(server, profile):
    context = profile()
    page = open_page(context, server.url, max_tokens=2000)
    send(page, "Write a long story about a fox.")
    wait_for_streaming(page)
    other = open_page(context, page.url, max_tokens=None)
    other.locator(".pt-chats li").first.hover()
    other.get_by_label(re.compile("^Delete")).first.click()
    other.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(".pt-notice")).to_contain_text("was deleted")
    expect(page.locator("#chat .user")).to_have_count(0)
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator(".pt-chat")).to_have_count(0)


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


CODE = "def f(x):\n    if x:\n\t\treturn 1\n    return 2"


def test_indented_code_stays_as_it_was_typed_and_can_be_edited_and_asked_again(server, profile):
    page = open_page(profile(), server.url)
    ask(page, CODE)
    assert page.locator("#chat .user").inner_text().strip() == CODE
    page.get_by_label("Edit").first.click()
    editor = page.locator("#chat .user textarea")
    expect(editor).to_have_value(CODE)
    editor.fill(CODE + "  # why?")
    page.get_by_label("Submit").click()
    expect(page.locator("#chat .pt-links")).to_contain_text("message 2/2")
    wait_for_replies(page, 1)
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("#chat .pt-links")).to_contain_text("reply 2/2")


def test_a_refused_edit_leaves_the_message_as_it_was_and_its_text_in_the_message_box(server, profile):
    page = open_page(profile(), server.url)
    ask(page, "What is a page table?")

    def edit(text: str) -> None:
        page.get_by_label("Edit").first.click()
        page.locator("#chat .user textarea").fill(text)
        page.get_by_label("Submit").click()

    long = "word " * 9000
    edit(long)
    expect(page.locator(".pt-notice")).to_contain_text("Your text is in the message box.")
    expect(message_box(page)).to_have_value(re.compile("^word word "))
    expect(page.locator("#chat .user")).to_have_text("What is a page table?")
    message_box(page).fill("")
    edit("   ")
    expect(page.locator(".pt-notice")).to_contain_text("cannot be blank")
    expect(page.locator("#chat .user")).to_have_text("What is a page table?")
    expect(message_box(page)).to_have_value("")
    edit("What is a cache line?")
    expect(page.locator("#chat .pt-links")).to_contain_text("message 2/2")


def test_escape_within_an_input_method_stops_nothing(server, profile):
    page = open_page(profile(), server.url, max_tokens=2000)
    send(page, "Write a very long story about a bridge.")
    wait_for_streaming(page)
    message_box(page).evaluate(
        "box => box.dispatchEvent(new KeyboardEvent('keydown',"
        " { key: 'Escape', isComposing: true, keyCode: 229, bubbles: true }))"
    )
    page.wait_for_timeout(500)
    expect(page.locator("#stop")).to_be_visible()
    page.keyboard.press("Escape")
    wait_for_replies(page, 1)


def test_stop_frees_the_engine_at_once_and_continue_goes_on(server, profile):
    page = open_page(profile(), server.url, max_tokens=2000)
    send(page, "Write a very long story about a lighthouse.")
    wait_for_streaming(page)
    with page.expect_request("**/gradio_api/**"):
        page.locator("#stop").click()
    server.wait(lambda health: health["running"] == 0, seconds=5)  # of the many that the whole reply takes
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
    page = open_page(profile(), server.url, max_tokens=2000)
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
    expect(other.locator(".pt-context")).to_be_hidden()  # how many tokens they are, the next reply tells
    ask(other, "And a mile?")
    expect(other.locator(".pt-context")).to_have_text(re.compile(r"context \d+ / "))
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
    open_settings(page)
    page.locator("#temperature input[type=number]").fill("1.5")
    page.locator("#seed textarea, #seed input").fill("7")
    page.locator("#system-prompt textarea").fill("You are a pirate.")
    expect(page.locator(".pt-notice")).to_be_hidden()
    assert int(ask(page, "Tell me a long story.")["out"]) == 5
    page.locator("#new-chat").click()
    expect(page.locator("#temperature input[type=number]")).to_have_value("0.2")
    page.locator(".pt-pick").click()
    expect(page.locator("#temperature input[type=number]")).to_have_value("1.5")
    page.reload()
    open_settings(page)
    expect(page.locator("#temperature input[type=number]")).to_have_value("1.5")
    expect(page.locator("#seed textarea, #seed input")).to_have_value("7")
    expect(page.locator("#max-tokens textarea, #max-tokens input")).to_have_value("5")
    expect(page.locator("#system-prompt textarea")).to_have_value("You are a pirate.")


def test_a_wrong_setting_is_refused_by_name_and_the_draft_kept(server, profile):
    page = open_page(profile(), server.url, max_tokens=None)
    open_settings(page)
    for name, value in (("max-tokens", "0"), ("seed", "-3"), ("top-k", "-5")):
        box = page.locator(f"#{name} textarea, #{name} input").first
        before = box.input_value()
        box.fill(value)
        message_box(page).fill(f"Hello, {name}")
        message_box(page).press("Enter")
        expect(page.locator(".pt-notice")).to_contain_text(f"{name.replace('-', '_')}={value}")
        expect(message_box(page)).to_have_value(f"Hello, {name}")
        expect(page.locator(".pt-none")).to_be_visible()
        box.fill(before)


def test_a_number_beyond_its_slider_is_named_and_goes_to_the_limit_when_the_reader_moves_on(server, profile):
    page = open_page(profile(), server.url, max_tokens=5)
    ask(page, "Hello")
    open_settings(page)
    box = page.locator("#top-p input[type=number]")
    box.fill("7")
    expect(page.locator(".pt-notice")).to_contain_text("top_p=7 must be between 0.0 and 1.0")
    message_box(page).click()
    expect(box).to_have_value("1")
    expect(page.locator(".pt-notice")).to_be_hidden()
    page.reload()
    open_settings(page)
    expect(box).to_have_value("1")  # what was shown was kept, without a message


def test_that_a_chat_is_still_answering_is_said_until_it_has_answered(server, profile):
    page = open_page(profile(), server.url, max_tokens=200)
    send(page, "Tell me a long story of the sea.")
    wait_for_streaming(page)
    message_box(page).fill("And of the hills.")
    message_box(page).press("Enter")
    expect(page.locator(".pt-notice")).to_contain_text("still answering")
    wait_for_replies(page, 1)
    expect(page.locator(".pt-notice")).to_be_hidden()
    expect(message_box(page)).to_have_value("And of the hills.")


def test_what_a_search_found_is_in_sight(server, profile):
    page = open_page(profile(), server.url, max_tokens=2)
    ask(page, "An old and rather windy harbour town, with many grey quails on it.")
    page.locator(".pt-search").fill("quails")
    found = page.locator(".pt-pick small")
    expect(found).to_contain_text("quails")
    below = """small => {
        const text = small.firstChild, word = document.createRange(), at = text.data.indexOf("quails");
        word.setStart(text, at);
        word.setEnd(text, at + 6);
        const [of, all] = [word.getBoundingClientRect(), small.getBoundingClientRect()];
        return Math.max(of.bottom - all.bottom, of.right - all.right);
    }"""
    assert found.evaluate(below) <= 1


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


def test_a_long_prefill_shows_its_progress(server, profile):
    page = open_page(profile(), server.url, max_tokens=2)
    message_box(page).fill("Summarise: " + "the quick brown fox jumps over the lazy dog " * 700)
    message_box(page).press("Enter")
    expect(page.locator("#chat .pt-pending")).to_have_text(re.compile(r"prefill [\d,]+ / [67],\d{3}"))
    wait_for_replies(page, 1)
