"""Builds a model and fills it from its checkpoint: GGUF or safetensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from models.checkpoint import INDEX, CheckpointError, is_gguf, load_tokenizer, read_config, weight_files
from models.config import ModelConfig
from models.dequantize import read_weight
from models.gguf import GGUFFile
from models.int4 import Int4Matrix
from models.layers.attention import get_backend
from models.layers.linear import Linear, Weight
from models.native import decoder
from models.registry import get_model_class
from models.stored import StoredTensor

__all__ = ["WeightsError", "count_parameters", "load_model", "load_tokenizer", "read_config"]

Progress = Callable[[str, float], None]
# (name in the Hugging Face checkpoint's spelling, the tensor or a way to read it, share of the whole done: 0-1)
Weights = Iterator[tuple[str, Callable[[], Weight], float]]


class WeightsError(CheckpointError):
    """Weights that are missing, left over, of the wrong shape, or damaged."""


def load_model(
    path: Path,
    config: ModelConfig,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = torch.float32,
    attention_backend: str = "sdpa",
    progress: Progress | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    native: bool = False,
) -> nn.Module:
    """The model with its weights, on `device` in `dtype`, ready for inference.

    Of tp_size ranks this one's shard is loaded; from safetensors no more than that is read. native: steps of few
    tokens go through models/native where they can; model.why_no_decoder says why where not.
    progress(stage, percent) is called as weights arrive. Raises WeightsError naming the weights that are
    missing, left over or misshapen, ValueError for what is not supported, OSError where files cannot be read.
    """
    path, device = Path(path), torch.device(device)
    kind: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model = get_model_class(config.architecture)(
        config, get_backend(attention_backend), dtype=kind, device=device, tp_rank=tp_rank, tp_size=tp_size
    )
    why_no_decoder = decoder.why_not(config, kind, device, tp_size) if native else "not asked for"
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    for linear in linears:
        linear.keeps_int4 = why_no_decoder is None
    weights = _gguf_weights(path, config) if is_gguf(path) else _folder_weights(path, in_part=tp_size > 1)
    with torch.inference_mode():
        try:
            _fill(model, weights, path, config.tie_word_embeddings, progress or (lambda stage, percent: None))
        finally:
            for parameter in model.parameters():
                # It knows the parameter: in a cycle weights outlive their model until the collector finds them.
                del parameter.weight_loader  # type: ignore[attr-defined]
        why_no_decoder = why_no_decoder or decoder.why_not_loaded(model)
        for linear in linears:
            linear.pack_weight(native=why_no_decoder is None)
        model.why_no_decoder = why_no_decoder
        if why_no_decoder is None:
            model.decoder = decoder.Decoder(model)
    return model.eval()


def _fill(model: nn.Module, weights: Weights, path: Path, tied: bool, progress: Progress) -> None:
    """Hands every weight to the parameter that wants it and checks that none is missing or left over."""
    wanted = _wanted(model)
    leftover: list[str] = []
    own_head: Tensor | None = None  # beside embeddings that are tied to the head
    progress("loading weights", 0.0)
    for name, read, done in weights:
        load = wanted.pop(name, None)
        try:
            if load is not None:
                load(read())
            elif tied and name == "lm_head.weight":
                own_head = _as_loaded(model.get_parameter("model.embed_tokens.weight"), read())
            elif not name.endswith("rotary_emb.inv_freq"):
                leftover.append(name)
        except ValueError as error:
            raise WeightsError(f"{path}: weight {name}: {error}") from error
        progress("loading weights", 100.0 * done)
    problems = [
        f"{len(names)} {what}: {', '.join(sorted(names)[:8])}{', ...' if len(names) > 8 else ''}"
        for what, names in (("missing", list(wanted)), ("left over", leftover))
        if names
    ]
    if problems:
        raise WeightsError(
            f"{path}: the weights do not fit {type(model).__name__}: {'; '.join(problems)}. "
            "The checkpoint is incomplete or of another architecture."
        )
    if own_head is not None and not torch.equal(own_head, model.get_parameter("model.embed_tokens.weight")):
        raise WeightsError(
            f"{path}: config.json ties the head to the embeddings, but lm_head.weight is another matrix: set "
            "tie_word_embeddings to false to use it, or take it out of the weights"
        )


def _as_loaded(parameter: nn.Parameter, weight: Weight) -> Tensor:
    """What the weight would be in the parameter, which stays as it is."""
    before = parameter.detach().clone()
    parameter.weight_loader(weight, None)  # type: ignore[attr-defined]
    loaded = parameter.detach().clone()
    parameter.detach().copy_(before)
    return loaded


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the whole model, without a byte of it in memory."""
    build = get_model_class(config.architecture)
    return build(config, get_backend("sdpa"), dtype=torch.bfloat16, device=torch.device("meta")).num_parameters


def _wanted(model: nn.Module) -> dict[str, Callable[[Weight], None]]:
    """Checkpoint name -> the load of each part of each parameter; a shared parameter is listed once."""
    wanted: dict[str, Callable[[Weight], None]] = {}
    for name, parameter in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        for part in parameter.parts:  # type: ignore[attr-defined]
            source = layer if part is None else f"{layer.rpartition('.')[0]}.{part}"
            loader = parameter.weight_loader  # type: ignore[attr-defined]
            wanted[f"{source}.{kind}"] = lambda tensor, loader=loader, part=part: loader(tensor, part)
    return wanted


# ---------------------------------------------------------------------- GGUF

_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def _gguf_weights(path: Path, config: ModelConfig) -> Weights:
    file = GGUFFile(path)
    total = sum(info.nbytes for info in file.tensors.values())
    permuted = config.architecture == "LlamaForCausalLM"
    done = 0
    for gguf_name, info in file.tensors.items():
        done += info.nbytes
        if gguf_name == "rope_freqs.weight":  # part of the configuration, read there
            continue
        name = _hf_name(gguf_name)
        heads = 0
        if permuted and ".attn_q." in gguf_name:
            heads = config.num_attention_heads
        elif permuted and ".attn_k." in gguf_name:
            heads = config.num_key_value_heads

        def read(gguf_name: str = gguf_name, heads: int = heads) -> Tensor | Int4Matrix:
            weight = read_weight(file, gguf_name)
            return _unpermute(weight, heads) if heads else weight

        yield name, read, done / total


def _hf_name(gguf_name: str) -> str:
    """GGUF's tensor name in the Hugging Face spelling; a name that has none is returned as it is."""
    layer = _LAYER_NAME.fullmatch(gguf_name)
    if layer and layer[2] in _GGUF_LAYER:
        return f"model.layers.{layer[1]}.{_GGUF_LAYER[layer[2]]}.{layer[3]}"
    stem, _, kind = gguf_name.rpartition(".")
    return f"{_GGUF_TOP[stem]}.{kind}" if stem in _GGUF_TOP else gguf_name


def _unpermute(weight: Tensor | Int4Matrix, heads: int) -> Tensor | Int4Matrix:
    """Undoes the row order of llama's q and k in GGUF: there the two halves that rotate together are interleaved
    (pair i is rows 2i and 2i+1 of a head), in Hugging Face checkpoints they are the head's two halves."""
    rows = weight.shape[0]
    if rows % (2 * heads):
        raise ValueError(f"{rows} rows do not divide into {heads} heads of pairs")
    order = torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(rows)
    return weight.take_rows(order) if isinstance(weight, Int4Matrix) else weight[order]


# ---------------------------------------------------------------------- safetensors


def _folder_weights(folder: Path, in_part: bool) -> Weights:
    """in_part: hand over tensors that are still in their files, for shards to be read of them."""
    files = _safetensors_files(folder)
    for number, file in enumerate(files):
        try:
            with safe_open(file, framework="pt") as archive:
                names = list(archive.keys())
                for i, name in enumerate(names):
                    done = (number + (i + 1) / len(names)) / len(files)
                    read = StoredTensor if in_part else _read_whole
                    yield name, lambda archive=archive, name=name, read=read: read(archive, name), done
        except SafetensorError as error:
            raise WeightsError(f"{file}: damaged or cut short ({error}); fetch it again") from error


def _read_whole(archive: Any, name: str) -> Tensor:
    return archive.get_tensor(name)


def _safetensors_files(folder: Path) -> list[Path]:
    """The files that hold the weights, by the index where there is one; WeightsError when any is not there."""
    files = weight_files(folder)
    if not files:
        raise WeightsError(f"{folder}: has no .safetensors file; other formats of weights are not read")
    for file in files:
        if not file.exists():
            raise WeightsError(f"{file}: named in {INDEX} but not there; the download is incomplete")
    return files
