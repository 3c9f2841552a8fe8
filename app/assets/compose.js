// The message box: a draft for every chat, and the messages that are on their way to the server.
//
// A draft is kept under its page's key: the chat's id, or, on a page without a chat, a name that the first message is
// sent under, too. A message stays in its box until the server has taken it: what is typed behind it is the next one's.
// It has a name, so that it is taken once, whatever became of the answer: after a break, or a reload, the page asks.
(() => {
  const pageturn = window.pageturn;
  const box = () => document.querySelector("#message textarea");
  const stored = (name) => { try { return sessionStorage.getItem(`pageturn-${name}`) ?? ""; } catch { return ""; } };
  function store(name, text) {
    try {
      if (text) sessionStorage.setItem(`pageturn-${name}`, text); else sessionStorage.removeItem(`pageturn-${name}`);
    } catch { /* storage is closed to this frame, or full */ }
  }

  // { name, text, key, unsure }: unsure of one that was refused or is not known to have come; it is still in its box.
  let onTheWay = [], key = "";
  try { onTheWay = JSON.parse(stored("sending") || "[]"); } catch { /* as none */ }
  // What stands in a page's box of these messages.
  const textOf = (messages, of) => messages.filter((one) => one.key === of && !one.unsure).map((one) => one.text).join("");
  const keepOnTheWay = () => store("sending", onTheWay.length ? JSON.stringify(onTheWay) : "");

  let blank = "";
  function blankKey() {
    if (!blank) store("blank", (blank = `new-${pageturn.randomHex(8)}`));
    return blank;
  }
  function rename(from, to) {
    const text = stored(`draft:${from}`);
    store(`draft:${from}`, "");
    store(`draft:${to}`, text);
    for (const message of onTheWay) if (message.key === from) message.key = to;
  }
  // Loaded again, or as another tab's copy, which must not send under that one's name.
  if (stored("blank")) rename(stored("blank"), blankKey());
  const draft = (of) => (of === key && box() ? box().value : stored(`draft:${of}`));
  function setDraft(of, text) {
    store(`draft:${of}`, text);
    if (of !== key || !box() || box().value === text) return;
    box().value = text;
    box().dispatchEvent(new Event("input", { bubbles: true }));
  }
  document.addEventListener("input", (event) => { if (key && event.target === box()) store(`draft:${key}`, box().value); });

  // The page turns to a chat, or to a page without one: "", a new one where the reader asks for it and the last one is
  // becoming a chat.
  pageturn.showDraft = (chat, anew = false) => {
    if (anew && onTheWay.some((message) => message.key === blank && !message.unsure)) blank = "";
    const next = chat || blankKey();
    if (next === key) return;
    const typed = key ? "" : (box()?.value ?? ""); // before the page knew what it shows
    if (!key) for (const message of onTheWay) message.key ||= next;
    key = next;
    setDraft(key, stored(`draft:${key}`) || typed);
  };
  // A text for the page's box; false where there is one in it.
  pageturn.offerDraft = (text) => {
    if (!key || draft(key).trim()) return false;
    setDraft(key, text);
    return true;
  };
  // Where a message goes that is sent now.
  pageturn.target = () => pageturn.open || blankKey();

  // The text as it stands when it is sent: Gradio reads the box some milliseconds later.
  let entered = null;
  document.addEventListener("keydown", (event) => { if (event.target === box() && event.key === "Enter" && !event.shiftKey) entered = box().value; }, true);
  document.addEventListener("click", (event) => { if (event.target.closest?.("#message .submit-button")) entered = box().value; }, true);

  // The box's text is sent: the target, the text of the message and its name.
  pageturn.sending = (text) => {
    if (entered !== null && text.startsWith(entered)) text = entered;
    entered = null;
    const target = pageturn.target();
    if (!text.trim()) return [target, "", ""];
    const before = textOf(onTheWay, key);
    let message = onTheWay.find((one) => one.key === key && one.unsure && one.text === text);
    if (!message && text === before) message = onTheWay.findLast((one) => one.key === key && !one.unsure); // sent twice
    if (!message) {
      const behind = before && text.startsWith(before);
      if (!behind) onTheWay = onTheWay.filter((one) => one.key !== key);
      message = { name: pageturn.randomHex(8), text: behind ? text.slice(before.length) : text, key };
      onTheWay.push(message);
    }
    message.unsure = false;
    keepOnTheWay();
    if (pageturn.waits()) pageturn.send("say_waiting", {});
    return [target, message.text, message.name];
  };
  // Whether a message of the page shown may wait for the model.
  pageturn.waits = () => !pageturn.stat?.ready && onTheWay.some((message) => message.key === key && !message.unsure);
  pageturn.namesOnTheWay = () => onTheWay.map((message) => message.name).join(" ");
  pageturn.namesIn = (body) => onTheWay.map((message) => message.name).filter((name) => body.includes(`"${name}"`));
  pageturn.awaitsNews = (names) => onTheWay.some((message) => !message.unsure && names.includes(message.name));
  pageturn.notTaken = (names) => {
    for (const message of onTheWay) if (names.includes(message.name)) message.unsure = true;
    keepOnTheWay();
  };
  // sent: the chats that took messages, by the messages' names; "" of those that none took. Returns the chat that the page
  // shown has become by it.
  pageturn.noteSent = (sent) => {
    let became = "";
    for (const [name, chat] of Object.entries(sent)) {
      const message = onTheWay.find((one) => one.name === name);
      if (!message) continue;
      if (!chat) {
        pageturn.notTaken([name]);
        continue;
      }
      const { key: from, text } = message, typed = draft(from);
      const before = textOf(onTheWay.slice(0, onTheWay.indexOf(message)), from);
      const left = typed.startsWith(before + text) ? before + typed.slice(before.length + text.length) : typed;
      onTheWay = onTheWay.filter((one) => one !== message);
      if (from === chat) {
        setDraft(from, left);
        continue;
      }
      rename(from, chat); // the page without a chat has become this one
      if (blank === from) store("blank", (blank = ""));
      if (key === from) key = became = chat;
      setDraft(chat, left);
    }
    keepOnTheWay();
    return became;
  };
})();
