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
    let shown = null, found = null, foundFor = "", latest = null;
    const show = () => {
      const value = props.value;
      if (!value) return;
      if (value.sent) pageturn.noteSent(value.sent);
      if (value.open !== undefined && value.choice >= choices && !pageturn.isOutdated(value.of)) {
        const moved = value.open !== shown, from = shown;
        pageturn.open = shown = value.open;
        pageturn.showDraft(value.open);
        if (moved) showSidebar(false);
        followReply(moved || Object.values(value.sent ?? {}).some(Boolean));
        showInAddress(value.open, !from || !value.open);
        wait = FIRST_WAIT;
        if (value.answering) trigger("follow", {});
      }
      if (value.gone && value.gone === shown) pick(value.gone); // which says so, on a new page
      if (latest?.since !== value.since || latest.number <= value.number) latest = value;
      const { chats } = latest;
      pageturn.ownChats = new Set(chats.map((chat) => chat.owner).filter(Boolean));
      pageturn.onOwnChats(pageturn.ownChats);
      const open = chats.find((chat) => chat.id === shown);
      document.title = open ? `${open.title} – PageTurn` : "PageTurn";
      element.querySelector(".pt-export").disabled = !shown;
      if (value.query !== undefined) { found = value.found; foundFor = value.query; }
      const searching = Boolean(search.value.trim());
      if (searching && value.query === undefined) trigger("search", { text: search.value }); // what was found may be gone
      const rows = searching && foundFor === search.value ? found : chats;
      // A title being typed and a question being read stay; the update that they cause draws the list anew.
      const busy = list.querySelector(".pt-newname, .pt-ask");
      if (!busy) list.replaceChildren(...rows.map((chat) => row(chat, chat.id === shown, trigger)));
      if (!busy && !rows.length) list.append(el("li", { className: "pt-none", textContent: search.value.trim() ? "Nothing found" : "No chats yet" }));
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
    new MutationObserver(toEnd).observe(log, { childList: true, subtree: true, characterData: true });
    new ResizeObserver(toEnd).observe(log);
  }

  // -- the top bar and the notice ------------------------------------------------------------------------------
  // Where the page is wide the sidebar always shows, whatever this says.
  const showSidebar = (open) => { byId("page").dataset.sidebar = open ? "open" : "closed"; };
  pageturn.mountTop = (element) => {
    element.querySelector(".pt-menu").addEventListener("click", () => showSidebar(byId("page").dataset.sidebar !== "open"));
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
  // Left, a slider's number goes to the slider's limit, which Gradio tells only as a "change"; what was typed was kept.
  document.addEventListener("blur", (event) => {
    const box = event.target;
    if (!box.matches?.("#settings-form input[type=number]")) return;
    const typed = box.value;
    setTimeout(() => { if (box.value !== typed) box.dispatchEvent(new Event("input", { bubbles: true })); });
  }, true);
  pageturn.mountNotice = (element, watch, props) => {
    const text = element.querySelector(".pt-notice");
    const show = () => {
      text.textContent = props.value?.text ?? "";
      text.hidden = !text.textContent;
      if (props.value?.refused) pageturn.notTaken([props.value.refused]);
    };
    watch("value", show);
    show();
    pageturn.replyEnded = () => { if (props.value?.busy) text.hidden = true; };
  };
  pageturn.setStat = (stat, lost = false) => {
    const becameReady = stat?.ready && pageturn.stat && !pageturn.stat.ready;
    pageturn.stat = stat;
    for (const listener of pageturn.listeners) listener(stat, lost);
    if (becameReady) pageturn.send?.("resync", { ready: true });
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
    pageturn.send?.("resync", { ready: false });
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
    if (event.key === "Escape") byId("stop")?.click();
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
    clipboard.writeText = (text) => write(text.replace(/\n*<span class="pt-line">[\s\S]*$/, ""));
  }
})();
