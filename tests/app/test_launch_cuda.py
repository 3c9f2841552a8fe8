"""app.py with a CUDA card and no setting: what it picks, what it says of it, how it answers."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.app_process import AppProcess

pytestmark = pytest.mark.gpu

START_S = 300.0  # of it most for kernels that are compiled for the first time on this machine


def answer(app: AppProcess, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": app.health()["model"], "messages": messages, "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(
        f"{app.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_a_card_is_picked_with_bf16_and_triton_and_the_log_says_so(tmp_path: Path, default_model_path: Path) -> None:
    assert default_model_path.exists()  # what is served where the hub, with a card's default, cannot be reached
    with AppProcess(data_dir=tmp_path / "data", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub")) as app:
        app.wait_open()
        app.wait_for(lambda: "is ready after" in app.log(), START_S)
        assert "cannot fetch 'Qwen/Qwen3-0.6B'" in app.log() and "using SmolLM2-135M-Instruct instead" in app.log()
        for choice in ("device: cuda", "dtype: bfloat16", "attention: triton", "graphs: "):
            assert re.search(rf"^{choice}", app.log(), re.MULTILINE), app.log()
        assert re.search(r"is ready after [\d.]+ s \(cuda(:0)?, bfloat16, [\d,]+ KV blocks of 32 tokens\)", app.log())

        messages = [{"role": "user", "content": "Name three colours of the rainbow and say where each is seen. " * 8}]
        first = answer(app, messages)
        reply = first["choices"][0]["message"]["content"]
        assert reply.strip()
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And a fourth?"}]
        second = answer(app, messages)
        reused = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert reused >= first["usage"]["prompt_tokens"] // 32 * 32 > 0
        assert app.end() == 0
