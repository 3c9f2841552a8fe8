// The page's own behaviour beside Gradio: identity, address, keys, list of chats, notices, drafts and reconnection.
(() => {
  const pageturn = (window.pageturn = { stat: null, open: "", listeners: [] });
  const el = (tag, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };
  pageturn.el = el;
  const byId = (id) => document.getElementById(id);
  const messageBox = () => document.querySelector("#message textarea");

  // -- identity ------------------------------------------------------------------------------------------------
  // A random 128-bit id in localStorage. It is read again before every event: eight tabs opened at once on a new
  // profile may each write one, and all must end up with the last. Where storage is closed, it lasts as long as the tab.
  let ownId = "";
  pageturn.user = () => {
    try {
      const stored = localStorage.getItem("pageturn-user");
      if (/^[0-9a-f]{32}$/.test(stored ?? "")) return (ownId = stored);
    } catch { /* storage is closed to this frame */ }
    if (!ownId) ownId = [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");
    try { localStorage.setItem("pageturn-user", ownId); } catch { /* as above */ }
    return ownId;
  };
  pageturn.user();

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
  function pick(id) {
    pageturn.open = id;
    pageturn.send("pick", { id });
  }
  document.addEventListener("click", (event) => { if (event.target.closest?.("#new-chat")) pageturn.open = blank = ""; }, true);
  // Where a message goes. A page without a chat has a name, so that a first message sent twice makes one chat.
  let blank = "";
  pageturn.target = () => pageturn.open || (blank ||= "new-" + [...crypto.getRandomValues(new Uint8Array(8))].map((b) => b.toString(16).padStart(2, "0")).join(""));

  // -- drafts: kept per chat until sent, through refusals and reloads --------------------------------------------
  const draftKey = (chat) => `pageturn-draft:${chat}`;
  function keepDraft() {
    try { sessionStorage.setItem(draftKey(pageturn.open), messageBox()?.value ?? ""); } catch { /* storage is closed */ }
  }
  function dropDraft(chat) {
    try { sessionStorage.removeItem(draftKey(chat)); } catch { /* storage is closed */ }
  }
  function restoreDraft() {
    const box = messageBox();
    let text = "";
    try { text = sessionStorage.getItem(draftKey(pageturn.open)) ?? ""; } catch { /* storage is closed */ }
    if (!box || box.value === text || (box.value && !text)) return;
    box.value = text;
    box.dispatchEvent(new Event("input", { bubbles: true }));
  }
  document.addEventListener("input", (event) => { if (event.target === messageBox()) keepDraft(); });

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
    element.querySelector(".pt-export").addEventListener("click", () => trigger("export_chat", {}));
    const file = element.querySelector("input[type=file]");
    element.querySelector(".pt-import").addEventListener("click", () => file.click());
    file.addEventListener("change", async () => {
      if (file.files[0]) trigger("import_chat", { text: await file.files[0].text() });
      file.value = "";
    });
    let first = true, shown = null, found = null, foundFor = "";
    const show = () => {
      const value = props.value;
      if (!value) return;
      if (value.open !== undefined) {
        const moved = value.open !== shown;
        pageturn.open = shown = value.open;
        if (value.sent !== null) { dropDraft(value.sent); dropDraft(value.open); }
        if (moved) blank = "";
        if (moved) restoreDraft();
        if (moved) showSidebar(false);
        followReply(moved || value.sent !== null);
        showInAddress(value.open, first || value.sent === "");
        first = false;
        if (value.answering) trigger("follow", {});
      }
      const open = value.chats.find((chat) => chat.id === shown);
      document.title = open ? `${open.title} – PageTurn` : "PageTurn";
      element.querySelector(".pt-export").disabled = !shown;
      if (value.query !== undefined) { found = value.found; foundFor = value.query; }
      const rows = search.value.trim() && foundFor === search.value ? found : value.chats;
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
      state.textContent = lost ? "Connection lost, trying again…"
        : !stat ? "" : stat.error ? `The model failed to load: ${stat.error}`
        : stat.ready ? "" : `Loading the model: ${stat.stage} ${Math.round(stat.percent)} %`;
    });
  };
  pageturn.mountNotice = (element, watch, props) => {
    const text = element.querySelector(".pt-notice");
    const show = () => { text.textContent = props.value?.text ?? ""; text.hidden = !text.textContent; };
    watch("value", show);
    show();
  };
  pageturn.setStat = (stat, lost = false) => {
    const becameReady = stat?.ready && pageturn.stat && !pageturn.stat.ready;
    pageturn.stat = stat;
    for (const listener of pageturn.listeners) listener(stat, lost);
    if (becameReady) pageturn.send?.("resync", {});
  };

  // -- reconnection: after a break, ask for the present state once the server answers -----------------------------
  let broken = false;
  window.addEventListener("pageturn:broken", () => { broken = true; tryAgain(); });
  let trying = false;
  async function tryAgain() {
    if (trying) return;
    trying = true;
    for (let wait = 300; broken; wait = Math.min(wait * 1.6, 3000)) {
      await new Promise((resolve) => setTimeout(resolve, wait));
      try {
        const root = new URL(window.gradio_config?.root ?? location.href, location.href).pathname.replace(/\/$/, "");
        if ((await fetch(`${root}/healthz`, { cache: "no-store" })).ok) broken = false;
      } catch { /* still away */ }
    }
    trying = false;
    pageturn.send?.("resync", {});
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
