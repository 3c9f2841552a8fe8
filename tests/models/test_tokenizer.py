"""The tokenizer against llama.cpp's ids, both ways, and its loading from GGUF and from a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from models.gguf import GGUFFile
from models.tokenizer import Tokenizer, TokenizerError

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2_tokens.json").read_text("utf-8"))["cases"]


@pytest.fixture(scope="module")
def smollm(default_model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(default_model_path))


def test_the_reference_has_all_its_strings() -> None:
    assert len(CASES) == 61


@pytest.mark.parametrize("case", CASES, ids=lambda c: ascii(c["text"])[:40])
def test_ids_equal_llama_cpp_and_decode_back(smollm: Tokenizer, case: dict) -> None:
    assert smollm.encode(case["text"]) == case["ids"]
    assert smollm.encode(case["text"], parse_special=True) == case["ids_special"]
    assert smollm.decode(case["ids"]) == case["text"]
    assert smollm.decode(case["ids_special"], skip_special_tokens=False) == case["text"]
    assert b"".join(smollm.token_bytes(i) or b"" for i in case["ids"]) == case["text"].encode()


# SmolLM2's vocabulary lacks six control characters and the bytes F1 and F2, which only unassigned planes use.
_SPELLABLE = st.characters(exclude_categories=("Cs", "Cn"), exclude_characters="\x04\x06\x13\x14\x16\x1d")


@settings(max_examples=200, deadline=None)
@given(text=st.text(_SPELLABLE))
def test_any_text_comes_back_whole_and_never_as_special_ids(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    assert smollm.decode(ids) == text
    assert not smollm.special_ids.intersection(ids)


def test_a_lone_surrogate_becomes_the_replacement_character(smollm: Tokenizer) -> None:
    assert smollm.decode(smollm.encode("a\ud800b")) == "a\ufffdb"


def test_special_tokens_show_only_on_request(smollm: Tokenizer) -> None:
    ids = smollm.encode("<|im_start|>user\nHi<|im_end|>", parse_special=True)
    assert ids[0] == smollm.bos_token_id
    assert ids[-1] in smollm.eos_token_ids
    assert smollm.decode(ids) == "user\nHi"
    assert smollm.token_bytes(ids[0]) == b""


def test_ids_past_the_vocabulary_show_nothing(smollm: Tokenizer) -> None:
    assert smollm.decode([smollm.vocab_size + 5]) == ""
    assert smollm.token_bytes(smollm.vocab_size) == b""


def test_add_bos_never_doubles_it(smollm: Tokenizer) -> None:
    assert smollm.encode("Hi", add_bos=True)[0] == smollm.bos_token_id
    ids = smollm.encode("<|im_start|>Hi", parse_special=True, add_bos=True)
    assert ids.count(smollm.bos_token_id) == 1


def test_fingerprint_follows_vocabulary_and_template(smollm: Tokenizer, default_model_path: Path) -> None:
    file = GGUFFile(default_model_path)
    assert Tokenizer.from_gguf(file).fingerprint == smollm.fingerprint
    file.metadata["tokenizer.chat_template"] += " "
    assert Tokenizer.from_gguf(file).fingerprint != smollm.fingerprint


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("tokenizer.ggml.pre", "tekken", "'tekken'"),
        ("tokenizer.ggml.model", "llama", "'llama'"),
        ("tokenizer.ggml.eos_token_id", 10**6, "1000000"),
        ("tokenizer.ggml.merges", ["no-such-pair"], "merges"),
        ("tokenizer.ggml.merges", ["qq zz"], "merges"),
        ("tokenizer.ggml.token_type", [1, 1], "2 token types"),
    ],
)
def test_tokenizer_metadata_that_does_not_fit_is_refused_by_name(
    default_model_path: Path, key: str, value: object, named: str
) -> None:
    file = GGUFFile(default_model_path)
    file.metadata[key] = value
    with pytest.raises(ValueError, match=named):
        Tokenizer.from_gguf(file)


def test_a_missing_pre_tokenizer_name_is_said(default_model_path: Path) -> None:
    file = GGUFFile(default_model_path)
    del file.metadata["tokenizer.ggml.pre"]
    with pytest.raises(ValueError, match="'missing'"):
        Tokenizer.from_gguf(file)


# ---------------------------------------------------------------------- folders


def save_bpe(folder: Path, *, bos: bool = False, template: str | None = None) -> Path:
    """A small trained byte-level BPE with ChatML tokens and a user-defined <think>, as a Hugging Face folder."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator(["the quick brown fox, the lazy dog, user assistant system"] * 4, trainer)
    bpe.add_tokens(["<think>", "</think>"])
    if bos:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}
    if template:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return folder


def test_a_folder_reads_its_special_tokens_and_every_eos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save_bpe(tmp_path))
    assert tokenizer is not None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (2, 0))
    assert not tokenizer.adds_bos
    text = "the <|im_end|> quick <think>fox</think> 😀"
    plain = tokenizer.encode(text)
    assert 2 not in plain
    assert tokenizer.decode(plain) == text
    assert 2 in tokenizer.encode(text, parse_special=True)
    think = tokenizer.encode("<think>")
    assert len(think) == 1 and tokenizer.token_bytes(think[0]) == b"<think>"


def test_a_folder_equals_transformers(tmp_path: Path) -> None:
    import transformers

    folder = save_bpe(tmp_path, bos=True)
    ours = Tokenizer.from_folder(folder)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    assert ours is not None and ours.adds_bos
    for case in CASES:
        ids = ours.encode(case["text"], parse_special=True, add_bos=True)
        assert ids == theirs(case["text"])["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_the_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    folder = save_bpe(tmp_path, template="old")
    (folder / "chat_template.jinja").write_text("new")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None and tokenizer.chat_template == "new"


def test_a_folder_without_a_tokenizer_gives_none(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None


def test_a_folder_with_only_a_slow_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_damaged_tokenizer_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "text", ["7" * 300_000, "The sea is wide and the land is narrow. " * 8000, "\n" * 200_000], ids=repr
)
def test_what_is_far_too_long_is_told_from_its_beginning(text: str, smollm: Tokenizer) -> None:
    seen: list[int] = []
    encode = smollm.encode
    smollm.encode = lambda part, **options: seen.append(len(part)) or encode(part, **options)  # type: ignore
    try:
        least = smollm.least_tokens(text, 1000)
    finally:
        del smollm.encode  # type: ignore[method-assign]
    assert sum(seen) <= 8000
    assert least <= len(smollm.encode(text))
    assert least >= 1000 or text.isspace()
    assert smollm.least_tokens(text[:8000], 1000) == 0
