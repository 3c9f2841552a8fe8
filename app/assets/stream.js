// Carries Gradio's event stream over a WebSocket, and lets the page outlive a broken one.
//
// Gradio reads events from one long HTTP response per tab. Browsers open six HTTP/1.1 connections per origin, so the
// seventh streaming tab would load nothing and could not even send "stop"; sockets are not counted. And when that
// response breaks, Gradio blocks every further event and reloads the page, which would cost the reader the draft.
// Here a broken stream ends its events as if they were complete and says "pageturn:broken"; page.js then waits for
// the server and asks for the present state, as after a reload.
(() => {
  const nativeFetch = window.fetch.bind(window);
  const encoder = new TextEncoder();
  const open = new Set(); // ids of events that the server accepted and has not completed
  const message = (value) => `data: ${JSON.stringify(value)}\n\n`;

  function completeAll() {
    const texts = [...open].map((id) =>
      message({ msg: "process_completed", event_id: id, success: true, output: { data: [], is_generating: false } }));
    open.clear();
    return texts.join("") + message({ msg: "close_stream" });
  }

  function noteCompleted(text) {
    for (const one of text.split("\n\n"))
      if (one.includes('"process_completed"')) open.delete(/"event_id":\s*"([0-9a-f]+)"/.exec(one)?.[1]);
  }

  // The events of one session as the streaming response that Gradio expects.
  function eventStream(request, url) {
    let socket = null, reader = null, ended = false;
    const body = new ReadableStream({
      start(controller) {
        const push = (text) => { if (!ended) controller.enqueue(encoder.encode(text)); };
        const end = (broken) => {
          if (ended) return;
          push(broken ? completeAll() : "");
          ended = true;
          controller.close();
          if (broken) window.dispatchEvent(new Event("pageturn:broken"));
        };
        let opened = false, closedByServer = false;
        const take = (text) => {
          noteCompleted(text);
          closedByServer ||= text.includes('"close_stream"');
          push(text);
        };
        const overHttp = async () => {
          try {
            const response = await nativeFetch(request);
            if (!response.ok) return end(true);
            reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
            for (let part = await reader.read(); !part.done; part = await reader.read()) take(part.value);
            end(!closedByServer);
          } catch { end(true); }
        };
        const address = new URL(url.pathname.replace(/gradio_api\/queue\/data$/, "stream/ws") + url.search, location.origin);
        address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
        socket = new WebSocket(address);
        socket.onopen = () => { opened = true; };
        socket.onmessage = (event) => take(event.data);
        socket.onclose = () => (opened ? end(!closedByServer) : overHttp());
        request.signal.addEventListener("abort", () => { ended = true; socket.close(); reader?.cancel().catch(() => {}); });
        eventStream.breakNow = () => { if (opened) { socket.close(); end(true); } };
      },
      cancel() { ended = true; socket?.close(); reader?.cancel().catch(() => {}); },
    });
    return new Response(body, { headers: { "content-type": "text/event-stream" } });
  }

  // An event's request. One that does not get through is an error in words, not the end of the page.
  async function sendEvent(input, init) {
    let response = null;
    try { response = await nativeFetch(input, init); } catch { /* away */ }
    if (!response || [502, 503, 504].includes(response.status)) { // the latter from a proxy before it
      window.dispatchEvent(new Event("pageturn:broken"));
      const words = "The server cannot be reached. Nothing was sent; your text is kept.";
      return Response.json({ detail: words, error: words }, { status: 502 });
    }
    if (response.ok) {
      const { event_id } = await response.clone().json();
      if (event_id) open.add(event_id);
    }
    return response;
  }

  window.fetch = (input, init) => {
    const url = new URL(input instanceof Request ? input.url : input, location.href);
    if (url.pathname.endsWith("/gradio_api/queue/data")) return Promise.resolve(eventStream(new Request(input, init), url));
    if (/\/gradio_api\/(queue\/join$|run\/)/.test(url.pathname)) return sendEvent(input, init);
    return nativeFetch(input, init);
  };
  // Back on a network after silence, a socket may look open and be dead: end it now.
  window.addEventListener("online", () => eventStream.breakNow?.());
})();
