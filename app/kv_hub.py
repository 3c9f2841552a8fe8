"""The live panel's hub: one task reads the engine's block table and feeds every watcher's socket.

Frames are JSON texts, sent over `WS /kv/ws`. The server speaks first; every frame from the hub task carries the
same two parts beside its own:

    "stat":   {"ready": bool, "stage": str, "percent": float (0-100), "error": str | null, "model": str,
               "running": int, "waiting": int,               requests
               "prefill_rate": float, "decode_rate": float,  tokens/s of the whole engine, recent
               "prompt_tokens": int, "hit_tokens": int,      lifetime sums
               "hit_rate": float,                            their ratio, 0-1
               "kv": {"total", "free", "cached", "active"}}  blocks
    "events": [{"seq": int, "ago": float (seconds), "kind": str, "owner": int, "request": int, "count": int,
                "detail": str}, ...]   new since this watcher's last frame (the first frame has the latest 20);
               kind is one of the engine's: allocate, hit, evict, free, preempt, finish, abort ...

Kinds of frame:

    {"type": "full",  "n": N, "block_size": B, "data": base64}   the whole table, on connect, after the pool changed
            its size, when more than FULL_ABOVE blocks changed at once, and after a slow watcher's backlog was dropped.
            data is N records of 3 bytes in physical order: state uint8, owner uint16 little-endian.
            n = 0 (data "") while the model is loading.
    {"type": "delta", "idx": [int, ...], "val": [int, ...]}      the blocks that changed since the previous frame;
            val = state | owner << 8, the same three bytes as one integer. Both lists are empty when only stat or
            events changed. No frame is sent while nothing at all changes.
    {"type": "block", "id", "state": str, "refcount", "position", "owner", "hits", "last_use": seconds ago | null}
            the answer to a hover; no stat, no events.

State codes: 0 free, 1 cached, 2 active (one sequence holds it), 3 shared (two or more hold it). "state" in a block
frame is the code's name. owner is the slot of the conversation whose sequence wrote the block (kept while the
block is cached, also when another conversation hits it); 0: nobody, or a request from the API. So a watcher tells
what happened to a block from two successive values: free to active is an allocation; cached to active or active to
shared under the same owner a hit; cached under one owner to active under another an eviction and a rewrite.

A watcher may send {"type": "hover", "id": n}; anything else closes the socket with code 1008.
"""
