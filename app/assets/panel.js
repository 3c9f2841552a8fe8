// The live panel: one canvas of all KV blocks fed by one WebSocket; frames as app/kv_hub.py's docstring says.
// Figures of the open chat come with the component's value (app/kv_panel.py), everything else over the socket.
(() => {
  const pageturn = window.pageturn;
  const SPARK_SECONDS = 60, STRIP_CELLS = 600;
  const KINDS = ["mine", "yours", "shared", "others", "cached", "free"];
  const LABELS = { yours: "your other chats" };
  const number = (value) => Math.round(value).toLocaleString("en-US");
  const ms = (seconds) => (seconds < 10 ? `${number(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`);
  const rate = (value) => (value >= 10 ? number(value) : value.toFixed(1));
  const count = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;

  pageturn.mountPanel = (element, watch, props) => {
    const find = (selector) => element.querySelector(selector);
    const put = (key, text) => { find(`[data-k="${key}"]`).textContent = text; };
    const grid = new pageturn.Grid(find(".pt-grid"));
    const spark = new Spark(find(".pt-spark"));
    const events = new Events(find(".pt-events"));
    const bar = find(".pt-bar"), legend = find(".pt-legend"), tip = find(".pt-tip");
    const elsewhere = new Elsewhere();
    let chat = props.value ?? {}, stat = null;
    for (const kind of KINDS) {
      bar.append(pageturn.el("i", { className: `pt-${kind}` }));
      legend.append(pageturn.el("li", {}, pageturn.el("i", { className: `pt-${kind}` }), pageturn.el("span", { textContent: LABELS[kind] ?? kind })));
    }

    function showTotals() {
      const totals = grid.totals(chat.owner ?? 0);
      KINDS.forEach((kind, i) => {
        bar.children[i].style.flexGrow = totals[kind];
        legend.children[i].lastChild.textContent = `${LABELS[kind] ?? kind} ${number(totals[kind])}`;
      });
      const used = grid.n - totals.free, share = grid.n ? used / grid.n : 0;
      put("used", grid.n ? `${share > 0 && share < 0.1 ? (100 * share).toFixed(1) : Math.round(100 * share)} %` : "–");
      put("used-note", grid.n ? `${number(used)} of ${count(grid.n, "block")}` : "");
      put("grid-note", grid.n ? `${grid.blockSize} tokens each${grid.perCell > 1 ? `, ${grid.perCell} blocks a cell` : ""}` : "");
    }
    function showStat() {
      if (!stat) return;
      spark.value = stat.decode_rate;
      const last = chat.turns?.at(-1);
      put("rate", last?.rate ? rate(last.rate) : stat.decode_rate ? rate(stat.decode_rate) : "–");
      put("rate-note", `all ${rate(stat.decode_rate ?? 0)} · ${stat.running} running · ${stat.waiting} waiting`);
      put("hits", last?.prompt ? `${Math.round((100 * last.cached) / last.prompt)} %` : "–");
      put("hits-note", `last turn · ${Math.round(100 * (stat.hit_rate ?? 0))} % since the start`);
    }
    function showChat() {
      const last = chat.turns?.at(-1);
      grid.owner = events.owner = chat.owner ?? 0;
      put("ttft", last?.ttft ? ms(last.ttft) : "–");
      put("ttft-note", last?.prompt ? `cached ${number(last.cached)} / ${number(last.prompt)} prompt tokens` : "");
      showStrip(find(".pt-strip"), last, put);
      events.showTurns(chat.turns ?? []);
      showContext(chat.context_used ?? null, chat.context_limit ?? 0);
      elsewhere.shown = Date.now();
      showTotals();
      showStat();
    }

    const link = new Link((frame, isFirst) => {
      if (frame.type === "block") return showTip(tip, frame, grid);
      if (frame.type === "full") { grid.load(frame.n, frame.block_size, frame.data); tip.hidden = true; }
      if (frame.type === "delta") grid.change(frame.idx, frame.val);
      stat = frame.stat;
      pageturn.setStat(stat);
      events.add(frame.events ?? []);
      elsewhere.look(frame.events ?? [], isFirst, chat.owner ?? 0);
      showTotals();
      showStat();
    }, () => {
      spark.value = 0; // what was the last word is not so any more
      put("rate-note", "no live figures");
      pageturn.setStat(pageturn.stat, true);
    });

    let asked = -1;
    const point = (event) => {
      const id = grid.blockAt(event.offsetX, event.offsetY);
      if (id === asked) return;
      asked = id;
      tip.hidden = true;
      if (id < 0) return;
      tip.style.left = `${Math.min(event.offsetX, grid.canvas.clientWidth - 200)}px`;
      tip.style.top = `${event.offsetY + 14}px`;
      link.say({ type: "hover", id });
    };
    grid.canvas.addEventListener("pointermove", point);
    grid.canvas.addEventListener("pointerdown", point);
    grid.canvas.addEventListener("pointerleave", () => { asked = -1; tip.hidden = true; });

    watch("value", () => {
      if (pageturn.isOutdated(props.value?.of)) return;
      chat = props.value ?? {};
      showChat();
      if (chat.ended) {
        pageturn.answering = false;
        pageturn.replyEnded?.();
        pageturn.send("settle", {});
      }
    });
    pageturn.onOwnChats = (slots) => { // the list of chats knows them
      grid.own = slots;
      showTotals();
      events.show();
    };
    pageturn.onOwnChats(pageturn.ownChats);
    const themed = () => { grid.theme(); spark.theme(); };
    new MutationObserver(themed).observe(document.body, { attributes: true, attributeFilter: ["class"] });
    let width = 0;
    new ResizeObserver(() => {
      if (element.clientWidth === width) return; // the list of events makes it higher all the time
      width = element.clientWidth;
      themed();
    }).observe(element);
    setInterval(() => { if (!document.hidden) { spark.tick(); put("spark-note", `${rate(spark.value)} tokens/s now`); } }, 1000);
    showChat();
    link.open();
  };

  // One socket while the tab can be seen; the server's first frame is always a full one.
  class Link {
    constructor(onFrame, onLost) { Object.assign(this, { onFrame, onLost, socket: null, wait: 500, timer: 0, numFailed: 0 });
      document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
      // After a silent loss the socket may look open and be dead.
      window.addEventListener("online", () => { this.close(); this.open(); }); }
    open() {
      clearTimeout(this.timer);
      if (this.socket || document.hidden) return;
      // Behind a proxy only the path of Gradio's own root is sure.
      const root = new URL(window.gradio_config?.root ?? location.href, location.href).pathname.replace(/\/$/, "");
      const url = new URL(`${root}/kv/ws`, location.origin);
      url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
      let socket = null;
      try { socket = this.socket = new WebSocket(url); } catch { return this.onLost(); } // forbidden to this page
      let isFirst = true;
      socket.onmessage = (event) => {
        this.wait = 500; this.numFailed = 0;
        this.onFrame(JSON.parse(event.data), isFirst);
        isFirst = false;
      };
      socket.onclose = () => {
        if (this.socket !== socket) return; // closed by us
        this.socket = null;
        this.onLost();
        // Not for a moment: once the server answers at all, the page asks for its state, or to be logged in again.
        if (++this.numFailed === 3) window.dispatchEvent(new Event("pageturn:broken"));
        this.timer = setTimeout(() => this.open(), this.wait);
        this.wait = Math.min(this.wait * 1.7, 5000);
      };
    }
    close() { clearTimeout(this.timer); const socket = this.socket; this.socket = null; socket?.close(); }
    say(value) { if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(value)); }
  }

  // Whether the open chat is answered in another tab of the reader's, by the blocks that it takes; then it is shown anew.
  class Elsewhere {
    constructor() {
      Object.assign(this, { shown: Date.now(), at: 0, seen: null });
      this.wentOn = () => !pageturn.answering && this.shown < this.at;
    }
    look(events, isFirst, owner) {
      const newest = events.at(-1)?.seq ?? -1;
      // What was before this tab is no news; a server that has started anew counts from the beginning.
      if (this.seen === null || (isFirst && newest < this.seen)) { this.seen = newest; return; }
      const news = events.filter((event) => event.seq > this.seen && owner && event.owner === owner
        && (event.kind === "allocate" || event.kind === "hit"));
      this.seen = Math.max(this.seen, newest);
      if (!news.length) return;
      this.at = Date.now() - 1000 * news.at(-1).ago;
      pageturn.lookAgain(this.wentOn);
    }
  }

  // The blocks of the last turn in logical order: filled was reused, hollow was computed.
  function showStrip(strip, turn, put) {
    strip.replaceChildren();
    if (!turn?.prompt || !turn.block_size) { put("strip-note", ""); strip.ariaLabel = "no blocks yet"; return; }
    const reused = Math.floor(turn.cached / turn.block_size);
    const total = Math.max(reused, Math.ceil((turn.prompt + turn.out) / turn.block_size));
    const perCell = Math.ceil(total / STRIP_CELLS);
    for (let i = 0; i < total; i += perCell)
      strip.append(pageturn.el("i", { className: i < reused ? "pt-reused" : "pt-computed" }));
    const words = `${number(reused)} of ${count(total, "block")} reused, ${number(total - reused)} computed`;
    put("strip-note", words);
    strip.ariaLabel = words;
  }

  function showContext(used, limit) {
    const bar = document.querySelector(".pt-context");
    if (!bar) return;
    bar.hidden = !limit || used === null;
    bar.title = `${number(used)} of ${number(limit)} tokens of context used`;
    bar.querySelector("i").style.width = `${limit ? Math.min(100, (100 * used) / limit) : 0}%`;
    bar.querySelector("span").textContent = `context ${number(used)} / ${number(limit)} tokens`;
    bar.classList.toggle("pt-nearly-full", limit > 0 && used / limit > 0.9);
  }

  const whose = (owner, open, nobody) => !owner ? nobody : owner === open ? "this chat"
    : pageturn.ownChats.has(owner) ? "another of your chats" : "another chat";

  function showTip(tip, block, grid) {
    const who = whose(block.owner, grid.owner, "API or nobody");
    const used = block.last_use === null ? "never used" : `used ${block.last_use < 1 ? "just now" : `${number(block.last_use)} s ago`}`;
    const turn = block.turn ? `, turn ${number(block.turn)}` : "";
    tip.textContent = block.state === "free" ? `#${block.id} · free`
      : `#${block.id} · ${block.state}${block.pinned ? ", pinned" : ""} · ${count(block.refcount, "reference")} · block ${number(block.position + 1)} of ${who}${turn} · ${count(block.hits, "hit")} · ${used}`;
    tip.hidden = false;
  }

  // The last five things that happened, in words: turns of the open chat with their cost, and the pool's events.
  class Events {
    constructor(list) { Object.assign(this, { list, owner: 0, turns: [], pool: [], seen: -1 }); }
    showTurns(turns) {
      this.turns = turns.slice(-5).map((turn) => ({ at: turn.at * 1000, text: turnWords(turn) }));
      this.show();
    }
    add(events) {
      // A full frame has the latest once more. A server that has started anew counts from the beginning, its owners too.
      const newest = events.at(-1)?.seq ?? this.seen;
      if (newest < this.seen) Object.assign(this, { pool: [], seen: -1 });
      const news = events.filter((event) => event.seq > this.seen);
      this.seen = newest;
      for (const event of news) {
        const at = Date.now() - event.ago * 1000, last = this.pool.at(-1);
        if (last && last.kind === event.kind && last.request === event.request && last.owner === event.owner) {
          last.count += event.count; // a decode takes a block every few steps: one line, not one per block
          last.at = at;
        } else this.pool.push({ at, ...event });
      }
      this.pool = this.pool.slice(-20);
      if (news.length) this.show();
    }
    show() {
      const pool = this.pool.map((event) => ({ at: event.at, text: this.words(event) })).filter((line) => line.text);
      const lines = [...this.turns, ...pool].sort((a, b) => b.at - a.at).slice(0, 5);
      this.list.replaceChildren(...lines.map((line) => pageturn.el("li", { textContent: line.text })));
    }
    words({ kind, owner, count: n, detail }) {
      const who = whose(owner, this.owner, "an API request");
      switch (kind) {
        case "allocate": return `${who} took ${count(n, "block")}`;
        case "hit": return `${who} reused ${count(n, "block")}`;
        case "copy": return `${who} copied ${count(n, "shared block")} before writing to it`;
        case "evict": return `${count(n, "cached block")} of ${who} evicted to make room`;
        case "preempt": return `${who} was preempted and will be recomputed`;
        case "pin": return `${count(n, "block")} of ${who} pinned`;
        case "unpin": return `${count(n, "block")} of ${who} unpinned${detail ? `: ${detail}` : ""}`;
        case "abort": return `${who} was stopped`;
        case "finish": return owner === this.owner && owner ? "" : `${who} finished after ${count(n, "token")}`;
        case "error": return `${who} failed: ${detail}`;
        default: return "";
      }
    }
  }
  function turnWords(turn) {
    if (!turn.prompt) return "";
    const size = turn.block_size || 1, blocks = Math.ceil(turn.prompt / size), reused = Math.floor(turn.cached / size);
    const without = turn.without && reused ? `, about ${ms(turn.without)} without the cache (estimate)` : "";
    return `turn ${turn.n}: reused ${number(reused)} of ${count(blocks, "block")}${turn.ttft ? `, ${ms(turn.ttft)}` : ""}${without}`;
  }

  class Spark {
    constructor(canvas) { Object.assign(this, { canvas, value: 0, values: new Array(SPARK_SECONDS).fill(0) }); }
    theme() {
      const scale = window.devicePixelRatio || 1;
      this.width = this.canvas.parentElement.clientWidth;
      this.height = 36;
      this.canvas.width = this.width * scale;
      this.canvas.height = this.height * scale;
      this.canvas.style.width = `${this.width}px`;
      this.canvas.style.height = `${this.height}px`;
      this.scale = scale;
      this.colour = getComputedStyle(this.canvas).getPropertyValue("--pt-mine").trim();
      this.draw();
    }
    tick() { this.values.shift(); this.values.push(this.value ?? 0); this.draw(); }
    draw() {
      if (!this.width) return;
      const context = this.canvas.getContext("2d"), top = Math.max(1, ...this.values);
      context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
      context.clearRect(0, 0, this.width, this.height);
      context.beginPath();
      this.values.forEach((value, i) => context.lineTo((i / (SPARK_SECONDS - 1)) * this.width, this.height - 1 - (value / top) * (this.height - 3)));
      context.strokeStyle = this.colour;
      context.lineWidth = 1.5;
      context.stroke();
    }
  }
})();
