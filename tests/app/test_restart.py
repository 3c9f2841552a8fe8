"""Faults that the process cannot survive: every stream gets the cause, the server restarts once, on the same port."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.support.app_process import ROOT, AppProcess

MODEL = "SmolLM2-135M-Instruct"
FAULTY_APP = "tests/support/faulty_app.py"
CAUSES = {"hang": "did not end within its deadline", "device": "device-side assert"}


def faulty_server(tmp_path: Path, kind: str, faults: int, model: Path) -> AppProcess:
    left = tmp_path / "faults"
    left.write_text(str(faults))
    argv = ("--num-kvcache-blocks", "600", "--model", str(model))
    return AppProcess(*argv, data_dir=tmp_path / "data", program=(FAULTY_APP, kind, str(left)))


def ask(server: AppProcess, max_tokens: int) -> str:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        messages: Any = [{"role": "user", "content": "Count from 1 to 20."}]
        reply = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=max_tokens)
    return reply.choices[0].message.content or ""


def patient_health(server: AppProcess) -> dict[str, Any]:
    """/healthz of whichever process comes to answer; a connection may be dropped, but never refused."""
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/healthz", timeout=60) as answer:
                return json.load(answer)
        except (http.client.RemoteDisconnected, ConnectionResetError):
            continue
        except urllib.error.URLError as error:
            assert not isinstance(error.reason, ConnectionRefusedError), server.log()


@pytest.mark.parametrize("kind", ["hang", pytest.param("device", marks=pytest.mark.long)])
def test_a_fault_ends_every_request_with_its_cause_and_the_server_restarts_once_and_only_once(
    kind: str, tmp_path: Path, shallow_model_path: Path
) -> None:
    with faulty_server(tmp_path, kind, 2, shallow_model_path) as server:
        server.wait_ready()
        pid = server.process.pid
        assert ask(server, 3)
        with pytest.raises(openai.APIError, match=CAUSES[kind]):
            ask(server, 50)
        server.wait_for(lambda: "the server restarts" in server.log(), 30)
        # Whoever comes in between waits at the open port instead of being refused.
        assert patient_health(server)["ready"] in (False, True)
        server.wait_for(lambda: "again, after a fault:" in server.log(), 30)
        server.wait_ready()
        assert server.process.poll() is None and server.process.pid == pid
        assert ask(server, 3)

        with pytest.raises(openai.APIError, match=CAUSES[kind]):
            ask(server, 50)
        server.wait_for(lambda: "it stays down" in server.log(), 30)
        health = server.health()
        assert health["ready"] is False and CAUSES[kind] in health["error"]
        with pytest.raises(openai.APIStatusError, match=CAUSES[kind]) as refused:
            ask(server, 3)
        assert refused.value.status_code == 503
        began = time.monotonic()
        assert server.end() == 0, server.log()
        assert time.monotonic() - began < 15


def test_a_server_killed_outright_leaves_nothing_that_keeps_the_next_one_from_its_port_and_folder(
    tmp_path: Path,
) -> None:
    with AppProcess(data_dir=tmp_path / "data") as first:
        first.wait_open()
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        with AppProcess(data_dir=tmp_path / "data", port=first.port) as second:
            second.wait_open()
            assert "in use" not in second.log()


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_script_that_uses_llm_leaves_no_process_behind_however_it_ends(sig: int, tiny_llama: Path) -> None:
    program = textwrap.dedent(f"""
        from engine import LLM, SamplingParams
        llm = LLM({str(tiny_llama)!r}, device="cpu", num_kvcache_blocks=64)
        print("ready", flush=True)
        while True:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    """)
    script = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert script.stdout is not None and script.stdout.readline() == b"ready\n"
        script.send_signal(sig)
        assert script.wait(10) != 0
        assert _members_of_session(script.pid) == []
    finally:
        script.kill()
        script.wait()


def _members_of_session(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    members.append(int(entry.name))
            except ProcessLookupError:
                continue
    return members
