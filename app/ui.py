"""The page: layout and event wiring only. What the events do is in ui_events.py, the looks in assets/.

No gr.State and no unload event: each would hold one more connection per tab. The open chat's id is in a hidden box
(and in the address, by assets/page.js); the browser's id is put in front of every event's arguments by IDENTIFY.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.themes import Base, Default

from app.kv_panel import kv_panel
from app.page_arguments import as_text
from app.page_blocks import PageBlocks
from app.settings_form import PRESETS, build_form
from app.ui_events import PageEvents

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("stream.js", "page.js", "compose.js", "grid.js", "panel.js")
FONT = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")
LATEX = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]
# These run in the browser before an event is sent. The first argument becomes the browser's id, and how often its
# reader has turned to a chat; the others what assets/page.js and compose.js know better than the page, which may not
# show yet what the reader picked last: where a message goes, what was sent and not answered.
# Settings are sent along where the reader may have changed them: another tab may have set them otherwise.
IDENTIFY = "(user, ...rest) => [pageturn.user(), ...rest]"
SENDING = (
    "(user, target, name, leaf, chat, text, ...form) => { [target, text, name] = pageturn.sending(text);"
    " return [pageturn.user(), target, name, pageturn.shownLeaf(), chat, text, ...pageturn.changed(form)]; }"
)
ACTING = "(user, chat, ...form) => [pageturn.user(), chat, ...pageturn.changed(form)]"
ON_MESSAGE = "(user, chat, first, ...form) => [pageturn.user(), chat, first, ...pageturn.changed(form)]"
PRESENT = "(user, target, names, ...rest) => [pageturn.user(), pageturn.target(), pageturn.namesOnTheWay(), ...rest]"
ADDRESS = "() => [pageturn.user(), pageturn.chatInAddress(), pageturn.namesOnTheWay()]"
# gr.HTML lets an event be listened to only where its name stands quoted in the component's script.
CUSTOM_EVENTS = (
    "'pick' 'rename' 'remove' 'search' 'export_chat' 'import_chat' 'act' 'follow' 'settle' 'resync' 'retry_load'"
    " 'say_waiting'"
)


@dataclass
class Page:
    """The components that events read and change. user, target, name and leaf are filled by the browser alone; chat is
    the id of the chat shown ("": a new one), first the id of its oldest turn shown."""

    user: gr.Textbox
    target: gr.Textbox
    name: gr.Textbox
    leaf: gr.Textbox
    chat: gr.Textbox
    first: gr.Textbox
    chat_list: gr.HTML
    new_chat: gr.Button
    older: gr.Button
    chatbot: gr.Chatbot
    notice: gr.HTML
    message: gr.Textbox
    stop: gr.Button
    panel: gr.HTML
    preset: gr.Dropdown
    form: list[Any]


def build_ui(chats: Any, engine: Any, settings: Any) -> tuple[gr.Blocks, dict[str, Any]]:
    """The page over a ChatService and an EngineThread; returns it with mount_gradio_app's theme, css and head."""
    events = PageEvents(
        chats,
        prefill_rate=lambda: engine.status().prefill_rate,
        retry_load=engine.retry,
        login=bool(settings.auth),
    )
    with PageBlocks(title="PageTurn", fill_width=True, analytics_enabled=False) as demo:
        events.page = _layout()
        _wire(demo, events.page, events)
    demo.close_events()
    return demo, {"theme": _theme(), "css": (ASSETS / "page.css").read_text(encoding="utf-8"), "head": _head()}


def _layout() -> Page:
    user = gr.Textbox(visible="hidden", elem_id="user")
    target = gr.Textbox(visible="hidden", elem_id="picked-chat")
    name = gr.Textbox(visible="hidden", elem_id="message-name")
    leaf = gr.Textbox(visible="hidden", elem_id="last-turn")
    chat = gr.Textbox(visible="hidden", elem_id="open-chat")
    first = gr.Textbox(visible="hidden", elem_id="first-turn")
    gr.HTML(
        elem_id="top",
        html_template=(ASSETS / "top.html").read_text(encoding="utf-8"),
        js_on_load="window.pageturn.mountTop(element)",
        apply_default_css=False,
    )
    with gr.Row(elem_id="page"):
        with gr.Column(elem_id="sidebar"):
            new_chat = gr.Button("New chat", elem_id="new-chat", variant="primary")
            chat_list = gr.HTML(
                elem_id="chats",
                html_template=(ASSETS / "chats.html").read_text(encoding="utf-8"),
                js_on_load=f"window.pageturn.mountChats(element, trigger, watch, props); // {CUSTOM_EVENTS}",
                apply_default_css=False,
            )
            # Not a gr.Accordion: that mounts what is in it when it is first unfolded, and once all of it has loaded
            # sets every control to the server's value again, over what was typed meanwhile.
            with gr.Column(elem_id="settings"):
                gr.HTML(
                    html_template='<button type="button" aria-expanded="false" aria-controls="settings-form">'
                    "Settings of this chat</button>",
                    js_on_load="window.pageturn.mountSettings(element)",
                    apply_default_css=False,
                )
                with gr.Column(elem_id="settings-form"):
                    preset, form = build_form()
        with gr.Column(elem_id="conversation"):
            older = gr.Button("Load older", elem_id="older", size="sm", visible=False)
            chatbot = gr.Chatbot(
                elem_id="chat",
                show_label=False,
                container=False,
                height="100%",
                autoscroll=False,  # assets/page.js does it
                editable="user",
                buttons=["copy"],
                latex_delimiters=LATEX,
                placeholder="**PageTurn**\n\nAsk something. The second turn reuses the first one's KV blocks.",
            )
            notice = gr.HTML(
                elem_id="notice",
                html_template='<p class="pt-notice" role="alert" hidden></p>',
                js_on_load="window.pageturn.mountNotice(element, watch, props)",
                apply_default_css=False,
            )
            with gr.Row(elem_id="compose"):
                message = gr.Textbox(
                    elem_id="message",
                    label="Message",
                    show_label=False,
                    container=False,
                    lines=1,
                    max_lines=10,
                    placeholder="Message (Enter sends, Shift+Enter: new line)",
                    submit_btn=True,
                    autofocus=True,
                    scale=1,
                )
                stop = gr.Button("Stop", elem_id="stop", variant="stop", visible=False, scale=0, min_width=80)
            gr.HTML(
                elem_id="context",
                html_template='<div class="pt-context" hidden><div><i></i></div><span></span></div>',
                js_on_load=None,
                apply_default_css=False,
            )
        with gr.Column(elem_id="panel-column"):
            panel = kv_panel()
    return Page(
        user,
        target,
        name,
        leaf,
        chat,
        first,
        chat_list,
        new_chat,
        older,
        chatbot,
        notice,
        message,
        stop,
        panel,
        preset,
        form,
    )


def _wire(demo: gr.Blocks, page: Page, events: PageEvents) -> None:
    # Arguments come as the browser sent them, to be refused in this page's own words and place.
    raw: dict[str, Any] = {"preprocess": False, "api_visibility": "private", "show_progress": "hidden"}
    # One id for all: else Gradio begins waiting events of several kinds in any order.
    raw |= {"concurrency_id": "page", "concurrency_limit": None}
    shown = (page.chat, page.first, page.chat_list, page.older, page.chatbot, page.notice, page.stop)
    outputs = [*shown, page.panel, *page.form]

    def on(listener: Callable[..., Any], handler: Callable[..., Any], *inputs: Any, js: str = IDENTIFY, **kwargs: Any):
        options = raw | {"trigger_mode": "multiple", "outputs": outputs}
        listener(handler, inputs=[page.user, *inputs], js=js, **(options | kwargs))

    on(demo.load, events.open_address, page.target, page.name, js=ADDRESS)
    on(page.new_chat.click, events.new)
    sent = [page.target, page.name, page.leaf, page.chat, page.message, *page.form]
    on(page.message.submit, events.send, *sent, js=SENDING)
    on(page.stop.click, events.stop, page.chat, outputs=None, queue=False)  # at once
    on(page.older.click, events.load_older, page.chat, page.first)
    on(page.chatbot.edit, events.edit, page.chat, page.first, *page.form, js=ON_MESSAGE)
    on(page.chatbot.retry, events.retry, page.chat, page.first, *page.form, js=ON_MESSAGE)
    on(page.chat_list.pick, events.pick)
    on(page.chat_list.rename, events.rename)
    on(page.chat_list.remove, events.remove, page.chat)
    on(page.chat_list.search, events.search)
    on(page.chat_list.export_chat, events.export, page.chat)
    on(page.chat_list.import_chat, events.bring_in)
    on(page.chat_list.act, events.act, page.chat, *page.form, js=ACTING)
    on(page.chat_list.follow, events.follow, page.chat, page.first, outputs=[page.chatbot, page.panel])
    ending = [page.chatbot, page.panel, page.stop, page.chat_list, page.notice]
    on(page.chat_list.settle, events.settle, page.chat, page.first, outputs=ending)
    on(page.chat_list.resync, events.resync, page.target, page.name, page.first, *page.form, js=PRESENT)
    page.chat_list.retry_load(events.load_again, None, None, **raw)
    page.chat_list.say_waiting(events.say_waiting, None, [page.notice], **raw)
    # "input" alone misses the first change after the server has set a text box.
    keep: dict[str, Any] = {"outputs": [page.notice], "trigger_mode": "always_last"}
    for control in page.form:
        for event in ("input", "blur", "release"):
            if event in {str(known) for known in control.EVENTS}:
                on(getattr(control, event), events.change_setting, page.chat, *page.form, **keep)
    page.preset.input(lambda name: PRESETS.get(as_text(name), ""), page.preset, page.form[0], **raw).then(
        events.change_setting, [page.user, page.chat, *page.form], [page.notice], js=IDENTIFY, **raw
    )


def _theme() -> Base:
    """System fonts only: a page that fetches a font tells somebody that it was opened."""
    return Default(primary_hue="indigo", neutral_hue="slate", font=FONT, font_mono=MONO)


def _head() -> str:
    scripts = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<script>\n{scripts}\n</script>'
