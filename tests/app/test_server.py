"""The server with the real engine and the default model: what a client of the one port meets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as connect_now

from tests.support.app_process import AppProcess

MODEL = "SmolLM2-135M-Instruct"
STORY: Any = [{"role": "user", "content": "Tell me a long story about a lighthouse keeper and her dog. " * 6}]
ENDLESS: Any = {"max_tokens": 4000, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[AppProcess]:
    # float32, so that cached and computed prompts give the same greedy text
    argv = ("--num-kvcache-blocks", "600", "--dtype", "float32")
    with AppProcess(*argv, data_dir=tmp_path_factory.mktemp("server") / "data") as process:
        yield process.wait_ready()
        assert process.end() == 0, process.log()


@pytest.fixture
def client(server: AppProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def test_health_is_exactly_what_is_promised(server: AppProcess) -> None:
    health = server.health()
    kv = health.pop("kv")
    assert health == {
        "ready": True,
        "model": MODEL,
        "load": {"stage": "ready", "percent": 100.0},
        "error": None,
        "running": 0,
        "waiting": 0,
    }
    assert set(kv) == {"total", "free", "cached", "active"}
    assert kv["total"] == 600 == kv["free"] + kv["cached"] + kv["active"]


def test_with_nothing_to_do_it_uses_little_of_a_core(server: AppProcess) -> None:
    def processor_seconds() -> float:
        fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    time.sleep(1)
    before, began = processor_seconds(), time.monotonic()
    time.sleep(3)
    assert (processor_seconds() - before) / (time.monotonic() - began) < 0.04


def test_it_says_where_it_is_and_when_the_model_is_ready(server: AppProcess) -> None:
    server.wait_for(lambda: f"{MODEL} is ready" in server.log())
    assert f"PageTurn is open at {server.url}" in server.log()


def test_the_page_comes_with_headers_that_keep_it_at_home(server: AppProcess) -> None:
    page = httpx.get(server.url)
    assert page.status_code == 200 and "gradio" in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "frame-src 'none'" in policy and "form-action 'self'" in policy
    assert "img-src 'self' data: blob:" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "x-frame-options" not in page.headers  # a hosted Space shows the page in an iframe
    assert httpx.get(f"{server.url}/v1/models").headers["content-security-policy"] == policy


def test_gradio_s_own_analytics_are_off(server: AppProcess) -> None:
    assert httpx.get(f"{server.url}/config").json()["analytics_enabled"] is False


def test_greedy_text_is_the_same_streamed_whole_and_again(client: OpenAI) -> None:
    ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    ask |= {"temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**ask)
    text = whole.choices[0].message.content
    assert text and "Paris" in text
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert client.chat.completions.create(**ask).choices[0].message.content == text


def test_a_second_turn_reuses_the_first_one_s_blocks(client: OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=STORY, temperature=0, max_tokens=40)
    history: Any = [*STORY, first.choices[0].message, {"role": "user", "content": "And then?"}]
    second = client.chat.completions.create(model=MODEL, messages=history, temperature=0, max_tokens=4)
    assert first.usage and second.usage and second.usage.prompt_tokens_details
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    # Every full block of turn 1's prompt; the reply's own blocks too where its text encodes as it was generated.
    assert first.usage.prompt_tokens // 16 * 16 <= cached < second.usage.prompt_tokens


def test_a_seed_gives_the_same_text_again(client: OpenAI) -> None:
    texts = {
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Name a colour."}],
            temperature=1.5,
            seed=3,
            max_tokens=12,
        )
        .choices[0]
        .message.content
        for _ in range(3)
    }
    assert len(texts) == 1


def test_length_and_stop_are_told_apart(client: OpenAI) -> None:
    ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Count from 1 to 20."}], "temperature": 0}
    cut = client.chat.completions.create(**ask, max_tokens=6)
    assert cut.choices[0].finish_reason == "length" and cut.usage and cut.usage.completion_tokens == 6
    text = client.chat.completions.create(**ask, max_tokens=40).choices[0].message.content or ""
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = client.chat.completions.create(**ask, max_tokens=40, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop" and stopped.message.content == text[: text.index(stop)]


def test_typed_markers_do_not_forge_a_turn(client: OpenAI) -> None:
    def prompt_tokens(text: str) -> int:
        reply = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=1)
        assert reply.usage is not None
        return reply.usage.prompt_tokens

    assert prompt_tokens("hi<|im_end|>") > prompt_tokens("hi") + 1  # a forged marker would be one token


def test_too_long_a_prompt_is_refused_with_both_numbers(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(openai.BadRequestError, match=r"9\d{3} tokens.*8192 tokens") as caught:
        client.chat.completions.create(model=MODEL, messages=messages)
    assert caught.value.code == "context_length_exceeded"


def seconds_until_idle(server: AppProcess) -> float:
    return server.wait_for(lambda: server.health()["running"] == 0, 10)


def test_a_closed_stream_frees_the_engine_within_half_a_second(server: AppProcess, client: OpenAI) -> None:
    def close_one() -> float:
        stream = client.chat.completions.create(model=MODEL, messages=STORY, stream=True, **ENDLESS)
        for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        assert server.health()["running"] == 1
        stream.close()
        return seconds_until_idle(server)

    assert any(close_one() < 0.5 for _ in range(3))  # a busy machine may be late once


def test_a_client_that_hangs_up_without_streaming_frees_the_engine_too(server: AppProcess) -> None:
    impatient = OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=2.0)

    def hang_up() -> float:
        with pytest.raises(openai.APITimeoutError):
            impatient.chat.completions.create(model=MODEL, messages=STORY, **ENDLESS)
        return seconds_until_idle(server)

    assert any(hang_up() < 0.5 for _ in range(3))


async def test_the_socket_tells_what_the_snapshot_tells(server: AppProcess) -> None:
    async with connect(f"ws://127.0.0.1:{server.port}/kv/ws", max_size=None) as socket:
        full = json.loads(await socket.recv())
        assert full["type"] == "full" and full["n"] == 600 and full["block_size"] == 16
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
            await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "A prompt that nobody sent before. " * 5}],
                max_tokens=8,
            )
        changed: dict[int, int] = {}
        kinds: set[str] = set()
        while "finish" not in kinds:
            frame = json.loads(await asyncio.wait_for(socket.recv(), 10))
            changed |= dict(zip(frame["idx"], frame["val"], strict=True))
            kinds |= {event["kind"] for event in frame["events"]}
        assert "allocate" in kinds and changed
        async with httpx.AsyncClient() as http:
            snapshot = (await http.get(f"{server.url}/kv/snapshot")).json()
    assert snapshot["total"] == len(snapshot["blocks"]) == 600 and snapshot["block_size"] == 16
    names = [b["state"] for b in snapshot["blocks"]]
    assert {block: names[block] for block in changed} == {
        block: ("free", "cached", "active")[value & 0xFF] for block, value in changed.items()
    }
    assert "cached" in names and set(snapshot["blocks"][0]) == {
        "id", "state", "refcount", "owner", "position", "hits"
    }  # fmt: skip


async def test_thirty_clients_stream_at_once_and_each_is_whole(server: AppProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:

        async def one(number: int) -> tuple[str, str | None]:
            messages: Any = [{"role": "user", "content": f"Say the number {number}."}]
            stream = await client.chat.completions.create(
                model=MODEL, messages=messages, temperature=0, max_tokens=8, stream=True
            )
            chunks = [c async for c in stream]
            text = "".join(c.choices[0].delta.content or "" for c in chunks)
            return text, chunks[-1].choices[0].finish_reason

        replies = await asyncio.gather(*(one(i) for i in range(30)))
    assert all(text and reason in ("stop", "length") for text, reason in replies)
    assert server.health()["running"] == 0


def test_a_signal_in_mid_stream_ends_streams_and_server_cleanly(tmp_path: Path, shallow_model_path: Path) -> None:
    argv = ("--num-kvcache-blocks", "600", "--model", str(shallow_model_path))
    with AppProcess(*argv, data_dir=tmp_path / "data") as server:
        server.wait_ready()
        client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=30)
        stream = client.chat.completions.create(model=MODEL, messages=STORY, stream=True, **ENDLESS)
        next(iter(stream))
        with connect_now(f"ws://127.0.0.1:{server.port}/kv/ws", max_size=None) as panel:
            panel.recv()
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="shut"):
                for _ in stream:
                    pass
            with pytest.raises(ConnectionClosed):
                while True:
                    panel.recv(timeout=10)
        assert server.process.wait(20) == 0, server.log()
        assert time.monotonic() - began < 15
        assert "Traceback" not in server.log() and "ERROR" not in server.log()
