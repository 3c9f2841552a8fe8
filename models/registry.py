"""Which class computes which architecture. The names alone are torch-free."""

from __future__ import annotations

from importlib import import_module

ARCHITECTURES = {
    "LlamaForCausalLM": "models.llama",
    "Qwen3ForCausalLM": "models.qwen3",
}
# general.architecture of a GGUF file -> Hugging Face class name
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def check_architecture(architecture: str) -> None:
    """Raises ValueError, with the list of known ones, for an architecture that is not implemented."""
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is not supported; {', '.join(ARCHITECTURES)} are")


def get_model_class(architecture: str) -> type:
    """The nn.Module class of an architecture; ValueError as check_architecture."""
    check_architecture(architecture)
    return getattr(import_module(ARCHITECTURES[architecture]), architecture)
