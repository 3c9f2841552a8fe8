// The page's own behaviour beside Gradio: identity, address, keys, list of chats, notices and reconnection. (The message
// box is compose.js's.)
(() => {
  const pageturn = (window.pageturn = { stat: null, open: "", listeners: [], ownChats: new Set(), onOwnChats() {} });
  const el = (tag, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };
  pageturn.el = el;
  // Show the open chat anew if it `wentOn` in another tab: once what this one has sent is shown, if that was not it, and
  // not while one of its messages is being edited, for the editor would stay, with another message in its place.
  const SOON = 700, looks = new Set(); // ms; what may have happened elsewhere, or is on its way
  let looking = 0;
  pageturn.lookAgain = (wentOn) => {
    looks.add(wentOn);
    looking ||= setTimeout(look, SOON);
  };
  function look() {
    looking = 0;
    for (const wentOn of looks) if (!wentOn()) looks.delete(wentOn);
    if (!looks.size) return;
    if (pageturn.namesOnTheWay() || document.querySelector("#chat textarea")) { looking = setTimeout(look, SOON); return; }
    looks.clear();
    pageturn.send("resync", { why: "elsewhere" });
  }
  pageturn.randomHex = (bytes) => [...crypto.getRandomValues(new Uint8Array(bytes))].map((b) => b.toString(16).padStart(2, "0")).join("");
  const byId = (id) => document.getElementById(id);

  // -- identity ------------------------------------------------------------------------------------------------
  // A random 128-bit id in localStorage. It is read again before every event: eight tabs opened at once on a new
  // profile may each write one, and all must end up with the last. Where storage is closed, it lasts as long as the tab.
  let ownId = "";
  const id = () => {
    try {
      const stored = localStorage.getItem("pageturn-user");
      if (/^[0-9a-f]{32}$/.test(stored ?? "")) return (ownId = stored);
    } catch { /* storage is closed to this frame */ }
    if (!ownId) ownId = pageturn.randomHex(16);
    try { localStorage.setItem("pageturn-user", ownId); } catch { /* as above */ }
    return ownId;
  };
  id();
  // Events say it with the number of times that the reader has turned to a chat: what comes of an earlier one than the
  // last no longer shows.
  let choices = 0;
  pageturn.user = () => `${id()}:${choices}`;

  // -- address -------------------------------------------------------------------------------------------------
  pageturn.chatInAddress = () => new URLSearchParams(location.search).get("chat") ?? "";
  pageturn.open = pageturn.chatInAddress(); // also where the server ends before it has shown it
  function showInAddress(chat, replace) {
    if (chat === pageturn.chatInAddress()) return;
    const url = new URL(location.href);
    if (chat) url.searchParams.set("chat", chat); else url.searchParams.delete("chat");
    history[replace ? "replaceState" : "pushState"](null, "", url);
  }
  window.addEventListener("popstate", () => pick(pageturn.chatInAddress()));
  // What is picked counts at once, for a message that is sent before the page shows it.
  function turnTo(chat, anew = false) {
    choices += 1;
    pageturn.open = chat;
    showInAddress(chat, false);
    pageturn.showDraft(chat, anew);
  }
  function pick(id) {
    turnTo(id);
    pageturn.send("pick", { id });
  }
  // To the chat that the page shown has become, unless it comes by itself, as it does but for a page that was loaded again
  // before its message was taken.
  function turnSoon(chat) {
    const before = choices;
    setTimeout(() => { if (!pageturn.open && choices === before) pick(chat); }, SOON);
  }
  document.addEventListener("click", (event) => { if (event.target.closest?.("#new-chat")) turnTo("", true); }, true);
  // Of two updates that arrive in the other order the older one would stay: then what is picked is shown once more.
  let newest = null, shownAgain = null;
  pageturn.isOutdated = (of) => {
    if (!of || of.since !== newest?.since || of.number >= newest.number) {
      newest = of ?? newest;
      return false;
    }
    if (shownAgain !== newest) {
      shownAgain = newest;
      pick(pageturn.open);
    }
    return true;
  };

  // What is touched of a chat's settings since they were shown; those of a new one are always sent along.
  let touched = false;
  for (const type of ["input", "keydown", "pointerdown"]) {
    document.addEventListener(type, (event) => { if (event.target.closest?.("#settings-form")) touched = true; }, true);
  }
  pageturn.changed = (form) => (touched || !pageturn.open ? form : form.map(() => null));

  // -- list of chats -------------------------------------------------------------------------------------------
  // Built from text nodes only: a gr.HTML template would evaluate a title such as `${…}` as script.
  pageturn.mountChats = (element, trigger, watch, props) => {
    pageturn.send = trigger;
    const list = element.querySelector(".pt-chats"), search = element.querySelector(".pt-search");
    let timer = 0;
    search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => trigger("search", { text: search.value }), 200);
    });
    // Back in view: what the reader's other tabs did to the list.
    document.addEventListener("visibilitychange", () => { if (!document.hidden && shown !== null) trigger("search", { text: search.value }); });
    element.querySelector(".pt-export").addEventListener("click", () => trigger("export_chat", {}));
    const file = element.querySelector("input[type=file]");
    element.querySelector(".pt-import").addEventListener("click", () => file.click());
    file.addEventListener("change", async () => {
      if (file.files[0]) trigger("import_chat", { text: await file.files[0].text() });
      file.value = "";
    });
    let shown = null, leaf = 0, more = false, listedWith = 0, missed = "", lookedFor = 0, found = null, foundFor = "", latest = null;
    pageturn.shownLeaf = () => (pageturn.open && pageturn.open === shown ? String(leaf) : "");
    const listed = (id) => latest.chats.find((chat) => chat.id === id);
    const wentOn = () => !pageturn.answering && listed(shown) && listed(shown).leaf !== leaf;
    const show = () => {
      const value = props.value;
      if (!value) return;
      const became = value.sent && pageturn.noteSent(value.sent);
      if (value.open !== undefined && value.choice >= choices && !pageturn.isOutdated(value.of)) {
        const moved = value.open !== shown, from = shown;
        pageturn.open = shown = value.open;
        leaf = value.leaf;
        if (value.form) touched = false;
        listedWith = value.number;
        pageturn.showDraft(value.open);
        if (moved) showSidebar(false);
        followReply(moved || Object.values(value.sent ?? {}).some(Boolean));
        showInAddress(value.open, !from || !value.open);
        wait = FIRST_WAIT;
        pageturn.answering = Boolean(value.answering);
        if (value.answering) trigger("follow", {});
      }
      if (became && !pageturn.open) turnSoon(became);
      if (value.gone && value.gone === shown) pick((missed = shown)); // which says so, on a new page
      if (latest?.since !== value.since || latest.number <= value.number) latest = value;
      const { chats } = latest;
      pageturn.ownChats = new Set(chats.map((chat) => chat.owner).filter(Boolean));
      pageturn.onOwnChats(pageturn.ownChats);
      const open = listed(shown);
      // Deleted in another tab: asked for once more, which says so.
      if (shown && !open && !latest.older && latest.number > listedWith && missed !== shown) pick((missed = shown));
      if (wentOn() && open.leaf !== lookedFor) { // once, whatever comes of it
        lookedFor = open.leaf;
        pageturn.lookAgain(wentOn);
      }
      document.title = open ? `${open.title} – PageTurn` : "PageTurn";
      element.querySelector(".pt-export").disabled = !shown;
      if (value.query !== undefined) { found = value.found; foundFor = value.query; more = value.more; }
      const searching = Boolean(search.value.trim());
      if (searching && value.query === undefined) trigger("search", { text: search.value }); // what was found may be gone
      const areFound = searching && foundFor === search.value, rows = areFound ? found : chats;
      // A title being typed and a question being read stay; the update that they cause draws the list anew.
      const busy = list.querySelector(".pt-newname, .pt-ask");
      if (!busy) list.replaceChildren(...rows.map((chat) => row(chat, chat.id === shown, trigger)));
      if (!busy && !rows.length) list.append(el("li", { className: "pt-none", textContent: searching ? "Nothing found" : "No chats yet" }));
      const rest = areFound ? more && "… and more: search for more words" : latest.older > 0 && `… and ${latest.older.toLocaleString("en-US")} older: search for them`;
      if (!busy && rest) list.append(el("li", { className: "pt-none", textContent: rest }));
      if (value.download) download(value.download);
    };
    watch("value", show);
    show();
  };
  function row(chat, isOpen, trigger) {
    const title = el("button", { className: "pt-pick", title: chat.title, onclick: () => pick(chat.id) },
      el("span", { className: "pt-title", textContent: chat.title }));
    if (chat.answering) title.append(el("span", { className: "pt-answering", title: "answering", textContent: "●" }));
    if (chat.snippet) title.append(el("small", { textContent: chat.snippet }));
    if (isOpen) title.setAttribute("aria-current", "true");
    const item = el("li", { className: isOpen ? "pt-chat pt-open" : "pt-chat" }, title);
    item.dataset.id = chat.id;
    item.append(
      el("button", { className: "pt-rename", title: "Rename", ariaLabel: `Rename ${chat.title}`, textContent: "✎", onclick: () => rename(item, chat, trigger) }),
      el("button", { className: "pt-delete", title: "Delete", ariaLabel: `Delete ${chat.title}`, textContent: "✕", onclick: () => askDelete(item, chat, trigger) }));
    return item;
  }
  function rename(item, chat, trigger) {
    const input = el("input", { className: "pt-newname", value: chat.title, maxLength: 200, ariaLabel: "New title" });
    const before = [...item.children];
    let done = false;
    const finish = (keep) => {
      if (done) return;
      done = true;  // (removing the input blurs it once more)
      item.replaceChildren(...before);
      if (keep && input.value.trim() && input.value !== chat.title) trigger("rename", { id: chat.id, title: input.value.trim() });
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") finish(true);
      if (event.key === "Escape") { event.stopPropagation(); finish(false); }
    });
    input.addEventListener("blur", () => finish(true));
    item.replaceChildren(input);
    input.focus();
    input.select();
  }
  function askDelete(item, chat, trigger) {
    const before = [...item.children];
    const no = el("button", { className: "pt-no", textContent: "Keep", onclick: () => item.replaceChildren(...before) });
    item.replaceChildren(
      el("span", { className: "pt-ask", textContent: `Delete “${chat.title}” for good?` }),
      el("button", { className: "pt-yes", textContent: "Delete", onclick: () => { item.replaceChildren(...before); trigger("remove", { id: chat.id }); } }), no);
    no.focus();
  }
  function download({ name, text }) {
    const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    el("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  // -- following the reply: only while the reader is at its end -----------------------------------------------------
  // (Chatbot's own autoscroll scrolls 300 ms late, wherever the reader has gone meanwhile.)
  let following = true;
  function followReply(fromEnd) {
    const log = document.querySelector("#chat [role=log]");
    if (!log) return;
    if (fromEnd) following = true;
    if (log.dataset.followed) return;
    log.dataset.followed = "yes";
    let last = 0;
    const atEnd = () => log.scrollTop + log.clientHeight >= log.scrollHeight - 40;
    log.addEventListener("scroll", () => {
      if (log.scrollTop < last || atEnd()) following = atEnd();
      last = log.scrollTop;
    });
    const toEnd = () => { if (following) log.scrollTop = log.scrollHeight; };
    // In the next frame, as the browser tells there first whether the reader has scrolled since the last one.
    let due = 0; // once a frame, however much comes: a tab that nobody sees has none for long
    const inNextFrame = () => { due ||= requestAnimationFrame(() => { due = 0; toEnd(); }); };
    new MutationObserver(inNextFrame).observe(log, { childList: true, subtree: true, characterData: true });
    new ResizeObserver(toEnd).observe(log);
  }

  // -- the top bar and the notice ------------------------------------------------------------------------------
  // Where the page is wide the sidebar always shows, whatever this says.
  const isDrawer = () => byId("page").dataset.sidebar === "open" && getComputedStyle(byId("sidebar")).position === "fixed";
  const showSidebar = (open) => { byId("page").dataset.sidebar = open ? "open" : "closed"; };
  pageturn.mountTop = (element) => {
    const menu = element.querySelector(".pt-menu");
    menu.addEventListener("click", () => showSidebar(byId("page").dataset.sidebar !== "open"));
    document.addEventListener("pointerdown", (event) => { // beside the drawer
      if (isDrawer() && !event.target.closest?.("#sidebar, .pt-menu")) showSidebar(false);
    });
    element.querySelector(".pt-retry").addEventListener("click", () => pageturn.send("retry_load", {}));
    const state = element.querySelector(".pt-state"), model = element.querySelector(".pt-model");
    const demo = element.querySelector(".pt-demo"), retry = element.querySelector(".pt-retry");
    pageturn.listeners.push((stat, lost) => {
      model.textContent = stat?.model ?? "";
      demo.hidden = !stat?.small_model;
      retry.hidden = !stat?.error;
      state.classList.toggle("pt-bad", Boolean(lost || stat?.error));
      state.textContent = lost ? (stat ? "Connection lost, trying again…" : "No live figures: their connection does not get through.")
        : !stat ? "" : stat.error ? `The model failed to load: ${stat.error}`
        : stat.ready ? "" : `Loading the model: ${stat.stage} ${Math.round(stat.percent)} %`;
    });
  };
  pageturn.mountSettings = (element) => {
    const button = element.querySelector("button");
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") !== "true";
      button.setAttribute("aria-expanded", open);
      byId("page").dataset.settings = open ? "open" : "closed";
    });
  };
  // Left, a slider's number goes to the slider's limit, which Gradio tells only as a "change"; what was typed was kept. (Not
  // at once: told beside the "blur", it may reach the server before that one's number.)
  const AFTER_BLUR = 100; // ms
  document.addEventListener("blur", (event) => {
    const box = event.target;
    if (!box.matches?.("#settings-form input[type=number]")) return;
    const typed = box.value;
    setTimeout(() => { if (box.value !== typed) box.dispatchEvent(new Event("input", { bubbles: true })); }, AFTER_BLUR);
  }, true);
  pageturn.mountNotice = (element, watch, props) => {
    const text = element.querySelector(".pt-notice");
    let said = "";
    const show = () => {
      if (said === JSON.stringify(props.value)) return; // and the draft that came with it was offered
      said = JSON.stringify(props.value);
      const isKept = props.value?.draft && pageturn.offerDraft(props.value.draft);
      text.textContent = (props.value?.text ?? "") + (isKept ? " Your text is in the message box." : "");
      text.hidden = !text.textContent;
      if (props.value?.refused) pageturn.notTaken([props.value.refused]);
      if (text.hidden && pageturn.waits()) pageturn.send?.("say_waiting", {}); // an earlier event's word has come over it
    };
    watch("value", show);
    show();
    pageturn.replyEnded = () => { if (props.value?.busy) text.hidden = true; };
  };
  pageturn.setStat = (stat, lost = false) => {
    const becameReady = stat?.ready && pageturn.stat && !pageturn.stat.ready;
    pageturn.stat = stat;
    for (const listener of pageturn.listeners) listener(stat, lost);
    if (becameReady) pageturn.send?.("resync", { why: "ready" });
  };

  // -- reconnection: after a break, ask for the present state once the server answers -----------------------------
  const FIRST_WAIT = 300; // ms; longer each time until an answer comes
  let broken = false, trying = false, wait = FIRST_WAIT;
  window.addEventListener("pageturn:broken", () => { broken = true; tryAgain(); });
  async function tryAgain() {
    if (trying) return;
    trying = true;
    while (broken) {
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(wait * 1.6, 3000);
      try {
        const root = new URL(window.gradio_config?.root ?? location.href, location.href).pathname.replace(/\/$/, "");
        if ((await fetch(`${root}/healthz`, { cache: "no-store" })).ok) broken = false;
      } catch { /* still away */ }
    }
    trying = false;
    pageturn.send?.("resync", { why: "back" });
  }

  // -- links in a reply's line: continue, retry, other branches ---------------------------------------------------
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("#chat a[href*='#pt-']");
    const match = /#pt-(continue|retry|branch)-(\d+)$/.exec(link?.getAttribute("href") ?? "");
    if (!match) return;
    event.preventDefault();
    event.stopPropagation();
    pageturn.send("act", { kind: match[1], turn: Number(match[2]) });
  }, true);

  // -- keys ----------------------------------------------------------------------------------------------------
  // Enter that confirms an input method's candidate must not send.
  for (const type of ["keydown", "keypress"]) {
    document.addEventListener(type, (event) => {
      if (event.key === "Enter" && (event.isComposing || event.keyCode === 229)) event.stopImmediatePropagation();
    }, true);
  }
  document.addEventListener("keydown", (event) => {
    const control = event.ctrlKey || event.metaKey;
    if (event.isComposing || event.keyCode === 229) return; // of an input method: Escape takes its candidate back
    if (event.key === "Escape") isDrawer() ? showSidebar(false) : byId("stop")?.click();
    else if (control && event.shiftKey && event.key.toLowerCase() === "o") byId("new-chat")?.click();
    else if (control && !event.shiftKey && event.key.toLowerCase() === "k") {
      showSidebar(true);
      document.querySelector(".pt-search")?.focus();
    } else return;
    if (event.key !== "Escape") event.preventDefault();
  });

  // The figures under a reply are not part of what "copy" copies.
  const clipboard = navigator.clipboard;
  if (clipboard?.writeText) {
    const write = clipboard.writeText.bind(clipboard);
    clipboard.writeText = (text) => write(typed(text.replace(/\n*<span class="pt-line">[\s\S]*$/, "")));
  }

  // A message of the reader's comes with its markup as entities (app/chat_view.py). The box to edit it, copies and what
  // is read out have it as it was typed.
  function typed(text) {
    return /^&#\d{7};/.test(text) ? text.replace(/&#(\d+);/g, (entity, code) => String.fromCodePoint(code)) : text;
  }
  const TYPED = '#chat :is(textarea, [data-testid="user"])';
  const labels = new WeakMap(); // as they were read back: not to be read once more
  function readBack(one) {
    const label = one.ariaLabel;
    if (label !== null && label !== labels.get(one)) {
      labels.set(one, label.replace(/&#\d{7};[\s\S]*/, typed));
      one.ariaLabel = labels.get(one);
    }
    if (one.tagName !== "TEXTAREA" || one.value === typed(one.value)) return;
    one.value = typed(one.value);
    one.dispatchEvent(new Event("input", { bubbles: true }));
  }
  // (It is told before the reader's next key comes.)
  new MutationObserver((records) => {
    for (const { type, target, addedNodes } of records) {
      for (const node of type === "attributes" ? [target] : addedNodes) {
        if (node instanceof Element) [node, ...node.querySelectorAll(TYPED)].filter((one) => one.matches(TYPED)).forEach(readBack);
      }
    }
  }).observe(document, { childList: true, subtree: true, attributeFilter: ["aria-label"] });
})();
