// Carries Gradio's event stream over WebSockets, and lets the page outlive broken ones.
//
// Gradio reads events from one long HTTP response per tab. Browsers open six HTTP/1.1 connections per origin, so the
// seventh streaming tab would load nothing and could not even send "stop"; sockets are not counted. When that response
// breaks, Gradio blocks every further event and reloads the page, which would cost the reader the draft. And when the
// server ends it, for want of events, just as the page sends one, Gradio never hears of that one again.
// Here Gradio reads one response for as long as the page stands. Behind it a socket is opened while events are open;
// a broken one ends them as if they were complete and says "pageturn:broken"; page.js then waits for the server and
// asks for the present state, as after a reload.
(() => {
  const nativeFetch = window.fetch.bind(window);
  const encoder = new TextEncoder();
  const open = new Set(); // ids of events that the server accepted and has not completed
  const early = new Map(); // how those ended that were completed before the page read that they were accepted
  const messages = new Map(); // names of the messages that an open event sends, by its id (see compose.js)
  let gradio = null; // the response that Gradio reads: { session, address, push(text) }
  let connection = null; // the one behind it: { end(broken), opened }
  // After a break the page goes by another name: the server may take long to notice that the old socket is dead, and
  // until then it sends there, and in the end drops, whatever is of the old name.
  let breaks = 0;
  const HANDSHAKE = 5000; // ms
  let numOverHttp = 0; // times in a row that no socket got through, but a request did
  const MOST_OVER_HTTP = 3; // after which no socket is tried
  const named = (session) => (breaks ? `${session}-${breaks}` : session);

  const completed = (id) => `data: ${JSON.stringify(
    { msg: "process_completed", event_id: id, success: true, output: { data: [], is_generating: false } })}\n\n`;

  function complete(id, message) {
    if (!open.delete(id)) early.set(id, message);
    noteEnd(messages.get(id), message);
    messages.delete(id);
  }
  // Of two updates of the list of chats that reach the page at one moment Gradio shows it the later one alone: where
  // that was not the one that says what became of a message, the page asks.
  const ANSWERED = 1000; // ms
  function noteEnd(names, message) {
    if (!names?.length) return;
    if (!JSON.parse(message.slice("data: ".length)).success) window.pageturn.notTaken(names);
    else setTimeout(() => { if (window.pageturn.awaitsNews(names)) window.pageturn.send("resync", { why: "elsewhere" }); }, ANSWERED);
  }

  function connect() {
    if (connection || !gradio || !open.size) return;
    let ended = false, closedByServer = false, rest = "", socket = null, reader = null;
    const own = (connection = { opened: false, end });
    const session = `?session_hash=${named(gradio.session)}`;

    function end(broken) {
      if (ended) return;
      ended = true;
      connection = null;
      socket?.close();
      reader?.cancel().catch(() => {});
      if (!broken) return connect(); // an event may have been accepted meanwhile
      breaks += 1;
      for (const id of open) gradio?.push(completed(id));
      open.clear();
      messages.clear(); // page.js asks what became of them
      window.dispatchEvent(new Event("pageturn:broken"));
    }
    function take(text) {
      const parts = (rest + text).split("\n\n");
      rest = parts.pop();
      for (const message of parts) {
        if (ended) return;
        const [, kind, id] = /^data: \{"msg":"(\w+)","event_id":(?:"(\w+)")?/.exec(message) ?? [];
        if (kind === "close_stream") closedByServer = true;
        else if (kind === "unexpected_error") end(true); // the server ends, or has forgotten this page
        else {
          if (kind === "process_completed") complete(id, message);
          gradio?.push(`${message}\n\n`);
        }
      }
    }
    async function overHttp() { // where sockets do not get through
      try {
        const response = await nativeFetch(gradio.address.pathname + session);
        if (!response.ok) return end(true);
        own.opened = true;
        numOverHttp += 1;
        reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        for (let part = await reader.read(); !part.done; part = await reader.read()) take(part.value);
        end(!closedByServer);
      } catch { end(true); }
    }

    if (numOverHttp >= MOST_OVER_HTTP) return void overHttp();
    const address = new URL(gradio.address.pathname.replace(/gradio_api\/queue\/data$/, "stream/ws") + session, location.origin);
    address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    try { socket = new WebSocket(address); } catch { return void overHttp(); }
    const opening = setTimeout(() => { // no answer: a proxy that knows no sockets
      if (ended) return;
      socket.onclose = null;
      socket.close();
      overHttp();
    }, HANDSHAKE);
    socket.onopen = () => {
      clearTimeout(opening);
      own.opened = true;
      numOverHttp = 0;
    };
    socket.onmessage = (event) => take(event.data);
    socket.onclose = () => {
      clearTimeout(opening);
      if (!ended) own.opened ? end(!closedByServer) : overHttp();
    };
  }

  function eventStream(request, address) {
    let own = null;
    const leave = () => {
      if (gradio !== own) return;
      gradio = null;
      connection?.end(true);
    };
    const body = new ReadableStream({
      start(controller) {
        gradio = own = {
          session: address.searchParams.get("session_hash"),
          address,
          push: (text) => controller.enqueue(encoder.encode(text)),
        };
        request.signal.addEventListener("abort", leave);
        connect();
      },
      cancel: leave,
    });
    return new Response(body, { headers: { "content-type": "text/event-stream" } });
  }

  // An event's request. One that does not get through is an error in words, not the end of the page.
  async function sendEvent(input, init) {
    const breaksBefore = breaks, names = window.pageturn.namesIn(init.body);
    if (breaks) {
      const event = JSON.parse(init.body);
      init = { ...init, body: JSON.stringify({ ...event, session_hash: named(event.session_hash) }) };
    }
    let response = null;
    try { response = await nativeFetch(input, init); } catch { /* away */ }
    if (!response?.ok) window.pageturn.notTaken(names);
    if (!response || isFromProxy(response)) {
      window.dispatchEvent(new Event("pageturn:broken"));
      const words = "The server cannot be reached. Nothing was sent; your text is kept.";
      return Response.json({ detail: words, error: words }, { status: 502 });
    }
    if (response.status === 401) location.reload(); // to the login; drafts are kept
    if (response.ok) {
      const { event_id } = await response.clone().json();
      if (early.has(event_id)) {
        noteEnd(names, early.get(event_id));
        early.delete(event_id);
      } else if (event_id) {
        if (breaks !== breaksBefore) gradio?.push(completed(event_id)); // what comes of it goes where nobody listens
        else {
          open.add(event_id);
          if (names.length) messages.set(event_id, names);
        }
        connect();
      }
    }
    return response;
  }
  // A proxy's word that the server is away; the server itself says in JSON what it is short of.
  const isFromProxy = (response) =>
    [502, 503, 504].includes(response.status) && !/json/.test(response.headers.get("content-type") ?? "");

  window.fetch = (input, init) => {
    const url = new URL(input instanceof Request ? input.url : input, location.href);
    if (url.pathname.endsWith("/gradio_api/queue/data")) return Promise.resolve(eventStream(new Request(input, init), url));
    if (/\/gradio_api\/(queue\/join$|run\/)/.test(url.pathname)) return sendEvent(input, init);
    return nativeFetch(input, init);
  };
  // Back on a network after silence, a socket may look open and be dead: end it now.
  window.addEventListener("online", () => { if (connection?.opened) connection.end(true); });
})();
