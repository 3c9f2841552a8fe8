"""Fixtures and skip rules shared by all tests. Heavy imports happen inside the fixtures that need them."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    # Here, before torch is loaded, and for the servers that tests start: threads that wait for each other across
    # processes with more of them than cores take half as long again.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests whose machine is not here (a CUDA card, a Chromium) and the long ones, each with its reason."""
    for mark, reason_to_skip in (("gpu", _no_gpu), ("browser", _no_browser), ("long", lambda: _not_asked(config))):
        marked = [item for item in items if item.get_closest_marker(mark)]
        reason = reason_to_skip() if marked else None
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
    # The longest first, so that no process is left alone with them at the end.
    items.sort(key=lambda item: "browser" not in item.path.parts and item.path.stem != "test_kernels_interpreted")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where pytest-xdist spreads the tests over processes (`pytest -n 2`): those of a file stay together, which share
    its fixtures, and all that drive a browser, which share a server and would slow each other down."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/browser/"):
                return "tests/browser"
            if "test_equivalence" in nodeid:
                return "test_equivalence"  # it takes long to read the default model with transformers
            # The interpreter's cases run in a process of their own, one file of them for minutes.
            return nodeid if "test_kernels_interpreted" in nodeid else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # else by the number of tests, which says little of their time
    return Scheduling(config, log)


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no CUDA card here"


def _no_browser() -> str | None:
    from importlib.util import find_spec

    from chromium import find_chromium

    if find_spec("playwright") is None:
        return "Playwright is not installed (pip install playwright)"
    return None if find_chromium() else "no Chromium here (apt-get install chromium, or playwright install chromium)"


def _not_asked(config: pytest.Config) -> str | None:
    return None if "long" in (config.option.markexpr or "") else "long; run with `pytest -m long`"


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Every run of a test draws the same ones from torch; where it means others it says so."""
    if torch := sys.modules.get("torch"):  # a test without it has no need to load it
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's .gguf, from the cache or fetched once; skips where it is neither."""
    from models.catalog import ModelUnavailable, resolve

    try:
        return resolve("default")
    except ModelUnavailable as error:
        pytest.skip(f"the default model is not cached and cannot be fetched: {error}")


@pytest.fixture(scope="session")
def shallow_model_path(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model without most of its layers, for tests that are not about what it says; see shallow_model."""
    from shallow_model import write_shallow

    return write_shallow(default_model_path, tmp_path_factory.mktemp("shallow"))


@pytest.fixture(scope="session")
def default_model_reference(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' float32 model of the default model's file, read by its own GGUF reader. Not to be changed."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("reference")
    shutil.copy(default_model_path, folder / "model.gguf")
    with pytest.MonkeyPatch.context() as patch:
        # It reads the vocabulary twice, and makes the table of names anew for each of 400 tensors: half a minute.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
    (folder / "model.gguf").unlink()
    return model


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make(kind, seed=0, **config) -> a folder with a tiny random "llama" or "qwen3", written by transformers.

    512 tokens, 3 layers, 4 query heads over 2 KV heads, context 512, no tokenizer. Weights are large enough that
    greedy tokens differ from one position to the next and are not near-ties.
    """

    def make(kind: str, seed: int = 0, **overrides: object) -> Path:
        import torch
        import transformers

        name = {"llama": "Llama", "qwen3": "Qwen3"}[kind]
        settings = {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
            **overrides,
        }
        config = getattr(transformers, f"{name}Config")(**settings)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = getattr(transformers, f"{name}ForCausalLM")(config)
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if "norm" in parameter_name:  # all ones otherwise, which would hide a missing norm weight
                        parameter.uniform_(0.5, 1.5)
                    elif parameter_name.endswith("bias"):  # all zeros otherwise
                        parameter.normal_(std=0.3)
        folder = tmp_path_factory.mktemp(f"tiny_{kind}")
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_llama(make_tiny_model: Callable[..., Path]) -> Path:
    """A folder with a tiny random Llama; see make_tiny_model."""
    return make_tiny_model("llama")


@pytest.fixture(scope="session")
def tiny_qwen3(make_tiny_model: Callable[..., Path]) -> Path:
    """A folder with a tiny random Qwen3; see make_tiny_model."""
    return make_tiny_model("qwen3", seed=1)
