"""What a person does on the page, and what they wait for."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Locator, Page, expect

FIGURES = re.compile(
    r"^TTFT [\d,]+ ms · (?P<prompt>[\d,]+) prompt \((?P<cached>[\d,]+) cached\) · (?P<out>[\d,]+) out"
    r"( · [\d.,]+ tok/s)? · (?P<finish>[^·]+)$"
)
LONG = 150_000  # ms; a reply on two cores that are busy otherwise


def late_events(ms: int, pattern: str = "") -> str:
    """A script for profile(): what comes over the event stream and matches `pattern` reaches the page so much later."""
    return f"""
    window.WebSocket = class extends WebSocket {{
      set onmessage(f) {{
        const isLate = (e) => /stream/.test(this.url) && RegExp({pattern!r}).test(e.data);
        super.onmessage = (e) => isLate(e) ? setTimeout(f, {ms}, e) : f(e);
      }}
      set onclose(f) {{ super.onclose = (e) => setTimeout(f, {ms} + 100, e); }}
    }};"""


def open_page(context: Any, url: str, max_tokens: int | None = 8) -> Page:
    """A tab with the page loaded; its new chats answer with at most max_tokens (None: as the page has it)."""
    page = context.new_page()
    page.goto(url)
    message_box(page).wait_for()
    expect(page.locator(".pt-chats li").first).to_be_attached()  # the first event was answered
    if max_tokens is not None:
        limit_replies(page, max_tokens)
    return page


def limit_replies(page: Page, max_tokens: int) -> None:
    box = page.locator("#max-tokens textarea, #max-tokens input")
    if not box.is_visible():
        open_settings(page)
    box.fill(str(max_tokens))
    page.get_by_role("button", name="Settings of this chat").click()


def open_settings(page: Page) -> None:
    """Unfold the form and wait until the server has filled it: one of its last controls is a tick that it sets."""
    page.get_by_role("button", name="Settings of this chat").click()
    expect(page.locator("#thinking input")).to_be_checked()


def message_box(page: Page) -> Locator:
    return page.locator("#message textarea")


def send(page: Page, text: str) -> None:
    message_box(page).fill(text)
    message_box(page).press("Enter")
    expect(message_box(page)).to_have_value("")


def replies(page: Page) -> Locator:
    """The figures lines: one under every finished reply."""
    return page.locator("#chat .pt-figures")


def wait_for_replies(page: Page, count: int) -> re.Match[str]:
    """Wait until `count` replies are finished; returns the last one's figures."""
    expect(replies(page)).to_have_count(count, timeout=LONG)
    match = FIGURES.match(replies(page).nth(count - 1).inner_text())
    assert match, replies(page).nth(count - 1).inner_text()
    return match


def ask(page: Page, text: str) -> re.Match[str]:
    """Send and wait for the whole reply; returns its figures."""
    before = replies(page).count()
    send(page, text)
    return wait_for_replies(page, before + 1)


def wait_for_streaming(page: Page, least_characters: int = 20) -> str:
    """Wait until the running reply shows some text; returns it."""
    expect(page.locator("#stop")).to_be_visible()
    page.wait_for_function(
        "least => [...document.querySelectorAll('#chat .bot')].at(-1)?.innerText.length > least"
        " && !document.querySelector('#chat .pt-pending')",
        arg=least_characters,
    )
    return last_reply(page)


def last_reply(page: Page) -> str:
    """The text of the newest reply, its line of figures left out."""
    return page.evaluate(
        "() => { const bubble = [...document.querySelectorAll('#chat .bot')].at(-1)?.cloneNode(true);"
        " bubble?.querySelectorAll('.pt-line').forEach(e => e.remove()); return bubble?.textContent.trim() ?? ''; }"
    )


def chat_id(page: Page) -> str:
    expect(page).to_have_url(re.compile(r"[?&]chat=[\w-]+"))
    return re.search(r"chat=([\w-]+)", page.url)[1]


def titles(page: Page) -> list[str]:
    return page.locator(".pt-chats .pt-title").all_inner_texts()
