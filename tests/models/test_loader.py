"""Loading: weights that do not fit stop it with their names; configurations in every spelling."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoint import CheckpointError
from models.gguf import GGUFError, GGUFFile
from models.layers.rotary import rope_frequencies
from models.loader import WeightsError, count_parameters, load_model, read_config
from models.registry import get_model_class
from models.stored import StoredTensor
from tests.models.gguf_writer import gguf


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def load(folder: Path, **place: int) -> torch.nn.Module:
    return load_model(folder, read_config(folder), **place)


def test_missing_and_left_over_weights_stop_the_load_with_their_names(folder: Path) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights["model.layers.1.self_attn.k_proj.weight"]
        del weights["model.norm.weight"]
        weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)

    edit_weights(folder, change)
    with pytest.raises(WeightsError) as caught:
        load(folder)
    text = str(caught.value)
    assert "2 missing: model.layers.1.self_attn.k_proj.weight, model.norm.weight" in text
    assert "1 left over: model.layers.9.mlp.up_proj.weight" in text


@pytest.mark.parametrize("tied", [True, False])
def test_each_rank_reads_its_shard_alone_and_together_they_are_the_whole(
    tied: bool, make_tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model("llama", tie_word_embeddings=tied, attention_bias=True, mlp_bias=True, vocab_size=511)
    config = read_config(folder)
    whole_reads: list[tuple[int, ...]] = []
    read = StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", lambda self: (whole_reads.append(self.shape), read(self))[1])
    whole = load_model(folder, config)
    ranks = [load_model(folder, config, tp_rank=rank, tp_size=2) for rank in range(2)]
    for layer, shards in zip(whole.model.layers, zip(*(r.model.layers for r in ranks), strict=True), strict=True):
        for name, dim in (("self_attn.o_proj", 1), ("mlp.down_proj", 1)):
            parts = [shard.get_submodule(name) for shard in shards]
            assert torch.equal(torch.cat([p.weight for p in parts], dim), layer.get_submodule(name).weight)
            assert torch.equal(sum(p.bias for p in parts), layer.get_submodule(name).bias)
        gate_up = [shard.mlp.gate_up_proj.weight.chunk(2) for shard in shards]
        assert torch.equal(
            torch.cat([*(g for g, _ in gate_up), *(u for _, u in gate_up)]), layer.mlp.gate_up_proj.weight
        )
        sizes = (config.hidden_size // 2, config.hidden_size // 4, config.hidden_size // 4)
        qkv = zip(*(shard.self_attn.qkv_proj.weight.split(sizes) for shard in shards), strict=True)
        assert torch.equal(torch.cat([torch.cat(parts) for parts in qkv]), layer.self_attn.qkv_proj.weight)
    heads = [rank.lm_head.weight for rank in ranks]
    assert [len(head) for head in heads] == [256, 255]
    assert torch.equal(torch.cat(heads), whole.lm_head.weight)
    # Norms, embedding and the biases that are added after the sum; no matrix that is split.
    assert {shape for shape in whole_reads if len(shape) == 2} == {(511, 64)}
    assert len([shape for shape in whole_reads if len(shape) == 2]) == 2  # the embedding, once on each rank
    assert count_parameters(config) == whole.num_parameters


def test_a_head_stored_beside_tied_embeddings_is_not_left_over(folder: Path) -> None:
    edit_weights(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    load(folder)


@pytest.mark.parametrize("place", [{}, {"tp_rank": 0, "tp_size": 2}, {"tp_rank": 1, "tp_size": 2}])
@pytest.mark.parametrize("first", ["head", "embedding"])
def test_a_head_of_its_own_beside_tied_embeddings_is_refused_with_what_to_do(
    folder: Path, place: dict[str, int], first: str
) -> None:
    """transformers computes with that head, and would say other things."""

    def add_head(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["lm_head.weight"][-1, 5] += 1

    edit_weights(folder, add_head)
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights, key=lambda name: name == ("lm_head.weight", "model.embed_tokens.weight")[first == "head"])
    (folder / "model.safetensors").unlink()
    for i, name in enumerate(names):
        save_file({name: weights[name]}, folder / f"{i:03}.safetensors")
    index = {"weight_map": {name: f"{i:03}.safetensors" for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"lm_head\.weight is another matrix: set tie_word_embeddings to false"):
        load(folder, **place)


def test_an_untied_model_without_a_head_says_so(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(WeightsError, match=r"1 missing: lm_head\.weight"):
        load(folder)


def test_a_weight_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit_weights(folder, lambda w: w.update({"model.norm.weight": torch.zeros(3)}))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight: shape \(3,\) does not fit \(64,\)"):
        load(folder)


def test_truncated_safetensors_are_one_clear_error(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match="damaged or cut short"):
            load(folder)


def test_sharded_weights_load_and_a_missing_shard_is_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: weights[n] for n in part}, folder / file)
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"b\.safetensors"):
        load(folder)


def test_progress_reaches_a_hundred(tiny_llama: Path) -> None:
    seen: list[tuple[str, float]] = []
    load_model(tiny_llama, read_config(tiny_llama), progress=lambda stage, percent: seen.append((stage, percent)))
    assert seen[0] == ("loading weights", 0.0) and seen[-1] == ("loading weights", 100.0)
    assert [p for _, p in seen] == sorted(p for _, p in seen)


def test_fused_parameters_hold_the_checkpoints_rows_in_order(tiny_llama: Path) -> None:
    weights = load_file(tiny_llama / "model.safetensors")
    model = load(tiny_llama)
    qkv = torch.cat([weights[f"model.layers.2.self_attn.{n}_proj.weight"] for n in "qkv"])
    assert torch.equal(model.model.layers[2].self_attn.qkv_proj.weight, qkv)


# ---------------------------------------------------------------------- configurations


def test_both_spellings_of_rope_and_dtype_read_the_same(folder: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    edit_config(folder, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}, dtype="bfloat16")
    new = read_config(folder)
    edit_config(
        folder,
        rope_parameters="absent",
        dtype="absent",
        rope_theta=5e5,
        rope_scaling={"type": "llama3", **scaling},
        torch_dtype="bfloat16",
    )
    old = read_config(folder)
    assert (new.rope_theta, new.rope_scaling, new.dtype) == (old.rope_theta, old.rope_scaling, old.dtype)
    assert old.rope_scaling == {"rope_type": "llama3", **scaling}
    assert (old.rope_theta, old.dtype) == (5e5, "bfloat16")


def test_every_eos_of_config_and_generation_config_counts(folder: Path) -> None:
    edit_config(folder, eos_token_id=[7, 8])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert read_config(folder).eos_token_ids == (7, 8, 9)


def test_an_eos_that_is_no_token_of_the_model_is_left_out_and_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be drawn; to forbid it, as min_tokens does, would be a fault of the step."""
    edit_config(folder, eos_token_id=[-1, 2, 512])
    assert read_config(folder).eos_token_ids == (2,)
    assert "[-1, 512]" in caplog.text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; LlamaForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": "absent"}, "'hidden_size' is missing"),
        ({"num_hidden_layers": -1}, "'num_hidden_layers' is -1"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide evenly by 3"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope_scaling .*'yarn'.* say different things"),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused_by_name(folder: Path, change: dict, named: str) -> None:
    edit_config(folder, **change)
    with pytest.raises(CheckpointError, match=named):
        read_config(folder)


def test_an_unknown_rope_type_stops_the_load_by_name(folder: Path) -> None:
    edit_config(folder, rope_parameters={"rope_type": "longrope", "factor": 2.0})
    with pytest.raises(ValueError, match="'longrope'"):
        load(folder)


def test_broken_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        read_config(folder)


def test_a_folder_without_a_configuration_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_config(tmp_path)


def test_the_registry_refuses_by_name_with_the_list() -> None:
    with pytest.raises(ValueError, match="'MambaForCausalLM' is not supported; LlamaForCausalLM, Qwen3ForCausalLM are"):
        get_model_class("MambaForCausalLM")


# ---------------------------------------------------------------------- GGUF of a folder


def folder_to_gguf(folder: Path, arch: str, permute: bool) -> bytes:
    """The folder's model as an F32 GGUF, q and k permuted as llama.cpp's converter does for llama."""
    config = json.loads((folder / "config.json").read_text())
    names = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(
            name.split(".")[-2]
        )
        if permute and heads:
            weight = weight.view(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            stem, kind = rest.rsplit(".", 1)
            gguf_name = f"blk.{layer}.{names[stem]}.{kind}"
        else:
            gguf_name = {
                "model.embed_tokens.weight": "token_embd.weight",
                "model.norm.weight": "output_norm.weight",
                "lm_head.weight": "output.weight",
            }[name]
        tensors[gguf_name] = (0, tuple(weight.shape), weight.float().contiguous().numpy().tobytes())
    metadata = {
        "general.architecture": ("str", arch),
        f"{arch}.block_count": ("u32", config["num_hidden_layers"]),
        f"{arch}.context_length": ("u32", config["max_position_embeddings"]),
        f"{arch}.embedding_length": ("u32", config["hidden_size"]),
        f"{arch}.feed_forward_length": ("u32", config["intermediate_size"]),
        f"{arch}.attention.head_count": ("u32", config["num_attention_heads"]),
        f"{arch}.attention.head_count_kv": ("u32", config["num_key_value_heads"]),
        f"{arch}.attention.key_length": ("u32", config["head_dim"]),
        f"{arch}.attention.layer_norm_rms_epsilon": ("f32", config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": ("f32", config["rope_parameters"]["rope_theta"]),
    }
    return gguf(metadata, tensors)


@pytest.mark.parametrize(("kind", "permute"), [("llama", True), ("qwen3", False)])
@pytest.mark.parametrize("untied", [False, True])
def test_a_gguf_holds_the_same_model_as_its_folder(
    make_tiny_model: Callable[..., Path], tmp_path: Path, kind: str, permute: bool, untied: bool
) -> None:
    folder = make_tiny_model(kind, seed=11, tie_word_embeddings=not untied)
    path = tmp_path / "m.gguf"
    path.write_bytes(folder_to_gguf(folder, kind, permute))
    for place in ({}, {"tp_rank": 0, "tp_size": 2}, {"tp_rank": 1, "tp_size": 2}):  # whole, and a rank's share
        from_gguf, from_folder = (load(source, **place).state_dict() for source in (path, folder))
        assert from_gguf.keys() == from_folder.keys()
        for name, weight in from_folder.items():
            assert torch.equal(from_gguf[name], weight), name


def test_rope_factors_in_a_gguf_become_part_of_the_configuration(
    make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_tiny_model("llama", seed=11)
    path = tmp_path / "m.gguf"
    path.write_bytes(folder_to_gguf(folder, "llama", True))
    file = GGUFFile(path)
    raw = {n: (0, t.shape, file.raw(n).tobytes()) for n, t in file.tensors.items()}
    raw["rope_freqs.weight"] = (0, (8,), torch.arange(1.0, 9.0).numpy().tobytes())
    kinds = {str: "str", int: "u32", float: "f32"}
    path.write_bytes(gguf({k: (kinds[type(v)], v) for k, v in file.metadata.items()}, raw))
    config = read_config(path)
    assert config.rope_scaling == {"rope_type": "frequency_factors", "factors": [float(i) for i in range(1, 9)]}
    load_model(path, config)


def test_a_gguf_s_attention_factor_multiplies_what_yarn_has_by_itself(tiny_qwen3: Path, tmp_path: Path) -> None:
    """As in llama.cpp; of transformers' attention_factor 1.0 would switch that off."""
    path = tmp_path / "m.gguf"
    path.write_bytes(folder_to_gguf(tiny_qwen3, "qwen3", False))
    file = GGUFFile(path)
    tensors = {n: (0, t.shape, file.raw(n).tobytes()) for n, t in file.tensors.items()}
    kinds = {str: "str", int: "u32", float: "f32"}
    metadata = {key: (kinds[type(value)], value) for key, value in file.metadata.items()}
    by_factor = {}
    for factor in (None, 1.0, 2.0):
        scaling = {"type": ("str", "yarn"), "factor": ("f32", 4.0), "original_context_length": ("u32", 128)}
        if factor is not None:
            scaling["attn_factor"] = ("f32", factor)
        path.write_bytes(
            gguf(metadata | {f"qwen3.rope.scaling.{key}": value for key, value in scaling.items()}, tensors)
        )
        by_factor[factor] = rope_frequencies(read_config(path))[1]
    assert by_factor[None] == by_factor[1.0] == pytest.approx(1 + 0.1 * math.log(4))
    assert by_factor[2.0] == 2 * by_factor[1.0]


def test_a_gguf_of_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf({"general.architecture": ("str", "mamba")}, {}))
    with pytest.raises(GGUFError, match="'mamba' is not supported; llama, qwen3 are"):
        read_config(path)


def test_the_default_model_reads_as_what_it_is(default_model_path: Path) -> None:
    config = read_config(default_model_path)
    assert (config.architecture, config.num_hidden_layers, config.hidden_size) == ("LlamaForCausalLM", 30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.max_position_embeddings, config.vocab_size, config.tie_word_embeddings) == (8192, 49152, True)
    assert (config.eos_token_ids, config.bos_token_id, config.rope_theta) == ((2,), 1, 100000.0)
