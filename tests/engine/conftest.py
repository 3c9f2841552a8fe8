"""What several of the engine's tests start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, model_runner


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Path) -> Iterator[LLM]:
    """A tiny Qwen3 whose steps are captured, without a card (see fake_graphs); at the end its books must balance."""
    import fake_graphs

    monkeypatch.setattr(model_runner.ModelRunner, "warm_up", lambda self, progress: None)
    with monkeypatch.context() as patch:
        fake_graphs.install(patch)
        llm = LLM(tiny_qwen3, **fake_graphs.SETTINGS)
    yield llm
    llm.engine.check_integrity()
    llm.exit()


@pytest.fixture(scope="module")
def reference(tiny_qwen3: Path) -> Any:
    """transformers' float32 model of tiny_qwen3."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32).eval()
