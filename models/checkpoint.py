"""What a model's files say before any weight is read: its ModelConfig and its tokenizer. Imports no torch.

A checkpoint is a .gguf file or a Hugging Face folder (config.json + *.safetensors).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.gguf import GGUFError, GGUFFile
from models.registry import GGUF_ARCHITECTURES, check_architecture
from models.tokenizer import Tokenizer, eos_ids, read_json

logger = logging.getLogger("pageturn.models")

# Longest context and widest layer that are believed; a damaged header must not ask for terabytes.
_LIMIT = 1 << 24
INDEX = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A checkpoint whose configuration is missing, damaged or not supported."""


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def read_config(path: Path) -> ModelConfig:
    """The model's configuration. Raises a ValueError (GGUFError, TokenizerError or CheckpointError) that names
    the file and what is wrong with it, or what is not supported."""
    path = Path(path)
    config = gguf_config(GGUFFile(path)) if is_gguf(path) else _folder_config(path)
    _check(config, path)
    return config


def weight_files(folder: Path) -> list[Path]:
    """The .safetensors files that hold a folder's weights: those that its index names, there or not, or else all.
    CheckpointError for an index without a list of them."""
    index_path = folder / INDEX
    index = read_json(index_path)
    if index is None:
        return sorted(folder.glob("*.safetensors"))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index_path}: has no 'weight_map'")
    return sorted({folder / str(name) for name in weight_map.values()})


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The checkpoint's tokenizer; None for a folder that has none (it then serves token ids only)."""
    path = Path(path)
    return Tokenizer.from_gguf(GGUFFile(path)) if is_gguf(path) else Tokenizer.from_folder(path)


def gguf_config(file: GGUFFile) -> ModelConfig:
    """ModelConfig from a GGUF file's metadata."""
    arch = file.require("general.architecture", str)
    if arch not in GGUF_ARCHITECTURES:
        raise GGUFError(f"{file.path}: architecture {arch!r} is not supported; {', '.join(GGUF_ARCHITECTURES)} are")

    def integer(key: str, default: int | None = None) -> int:
        full = f"{arch}.{key}"
        return file.require(full, int) if default is None else file.get(full, int, default)

    hidden, heads = integer("embedding_length"), integer("attention.head_count")
    if heads <= 0:
        raise GGUFError(f"{file.path}: {arch}.attention.head_count is {heads}; it must be at least 1")
    head_dim = integer("attention.key_length", hidden // heads)
    rotated = integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise GGUFError(f"{file.path}: rotates {rotated} of {head_dim} dimensions of a head; only all are supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise GGUFError(f"{file.path}: tensor 'token_embd.weight' is missing")
    eos = [file.get(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("eos", "eot", "eom")]
    vocab_size = embedding.shape[0]
    return ModelConfig(
        architecture=GGUF_ARCHITECTURES[arch],
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=integer("feed_forward_length"),
        num_hidden_layers=integer("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=integer("context_length"),
        rms_norm_eps=file.get(f"{arch}.attention.layer_norm_rms_epsilon", float, 1e-5),
        rope_theta=file.get(f"{arch}.rope.freq_base", float, 10000.0),
        rope_scaling=_gguf_rope(file, arch),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", int, None),
        eos_token_ids=_known([e for e in eos if e is not None], vocab_size, file.path),
        dtype=None,
        raw={key: value for key, value in file.metadata.items() if not isinstance(value, list)},
    )


def _known(ids: list[int], vocab_size: int, path: Path) -> tuple[int, ...]:
    """Those that the model can give, once each: others would be banned in a row that does not have them."""
    unknown = [token for token in ids if not 0 <= token < vocab_size]
    if unknown:
        logger.warning("%s: end-of-sequence ids %s are none of the %d of the vocabulary", path, unknown, vocab_size)
    return tuple(dict.fromkeys(token for token in ids if 0 <= token < vocab_size))


def _gguf_rope(file: GGUFFile, arch: str) -> dict[str, Any] | None:
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        if factors.type_name != "F32":
            raise GGUFError(f"{file.path}: tensor 'rope_freqs.weight' is {factors.type_name}; expected F32")
        values = file.raw("rope_freqs.weight").view("<f4").tolist()
        return {"rope_type": "frequency_factors", "factors": values}
    kind = file.get(f"{arch}.rope.scaling.type", str, "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind}
    for key, name in (
        ("factor", "factor"),
        ("original_context_length", "original_max_position_embeddings"),
        ("attn_factor", "attention_multiplier"),  # of what the type has by itself, where transformers' replaces that
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        value = file.metadata.get(f"{arch}.rope.scaling.{key}")
        if value is not None:
            scaling[name] = value
    return scaling


def _folder_config(folder: Path) -> ModelConfig:
    """ModelConfig from config.json, in the spelling of transformers 4 or 5, and generation_config.json."""
    path = folder / "config.json"
    raw = read_json(path)
    if raw is None:
        raise CheckpointError(f"{folder}: has no config.json; expected a Hugging Face model folder or a .gguf file")
    reader = _Json(raw, path)
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise CheckpointError(f"{path}: 'architectures' is {architectures!r}; expected a list with a class name")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(f"{path}: weights quantised by {method!r} are not supported; use an unquantised model")
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    vocab_size = reader.integer("vocab_size")
    theta, scaling = _folder_rope(reader)
    generation = read_json(folder / "generation_config.json") or {}
    eos = eos_ids(raw.get("eos_token_id")) + eos_ids(generation.get("eos_token_id"))
    bos = raw.get("bos_token_id")
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    if raw.get("use_sliding_window") or (raw.get("sliding_window") and "use_sliding_window" not in raw):
        raise CheckpointError(f"{path}: sliding-window attention ({raw.get('sliding_window')}) is not supported")
    return ModelConfig(
        architecture=architectures[0],
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size"),
        num_hidden_layers=reader.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=reader.integer("num_key_value_heads", heads),
        head_dim=reader.integer("head_dim", hidden // heads),
        max_position_embeddings=reader.integer("max_position_embeddings", 2048),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        hidden_act=str(raw.get("hidden_act", "silu")),
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=_known(eos, vocab_size, path),
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        raw=raw,
    )


def _folder_rope(reader: _Json) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from rope_parameters (transformers 5) or rope_theta and rope_scaling (before it)."""
    raw = reader.raw
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    scaling = new or old or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise CheckpointError(f"{reader.path}: rope parameters {scaling!r} are not supported; expected one flat object")
    if isinstance(new, dict) and isinstance(old, dict) and new and old and _rope_words(new) != _rope_words(old):
        raise CheckpointError(
            f"{reader.path}: rope_parameters {new} and rope_scaling {old} say different things; write into "
            "rope_parameters what is meant, rope_theta with it, and take rope_scaling out"
        )
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    partial = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise CheckpointError(f"{reader.path}: partial_rotary_factor {partial} is not supported; only 1.0 is")
    if kind == "default":
        return theta, None
    scaling = {key: value for key, value in scaling.items() if key not in ("rope_theta", "type")}
    original = raw.get("original_max_position_embeddings")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return theta, {**scaling, "rope_type": kind}


def _rope_words(scaling: dict[str, Any]) -> dict[str, Any]:
    """What it says beside the base, which may stand elsewhere, in one spelling."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    words = {key: value for key, value in scaling.items() if key not in ("rope_theta", "type") and value is not None}
    return words | {"rope_type": kind}


class _Json:
    """Typed reads from config.json."""

    def __init__(self, raw: dict[str, Any], path: Path) -> None:
        self.raw = raw
        self.path = path

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.path}: {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.path}: {key!r} is {value!r}; expected an integer of at least 1")
        return value


def _check(config: ModelConfig, path: Path) -> None:
    """Refuses shapes that no file of this family has, and features that are not implemented."""
    try:
        check_architecture(config.architecture)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings",
    ):  # fmt: skip
        value = getattr(config, name)
        if not 1 <= value <= _LIMIT:
            raise CheckpointError(f"{path}: {name} is {value}; expected 1 to {_LIMIT}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError(
            f"{path}: {config.num_attention_heads} query heads do not divide evenly by "
            f"{config.num_key_value_heads} KV heads"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{path}: head_dim {config.head_dim} is odd; rotary embedding needs pairs")
    if config.hidden_act not in ("silu", "swish"):
        raise CheckpointError(f"{path}: hidden_act {config.hidden_act!r} is not supported; 'silu' is")
    if not config.rms_norm_eps > 0 or not config.rope_theta > 0:
        raise CheckpointError(
            f"{path}: rms_norm_eps {config.rms_norm_eps} and rope_theta {config.rope_theta} must be above 0"
        )
