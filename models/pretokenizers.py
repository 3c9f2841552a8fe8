"""How a text is cut into words before byte-level BPE, by the name that a GGUF file gives in `tokenizer.ggml.pre`.

The patterns are those of the models' own tokenizers, as llama.cpp applies them for the same names; a split with
"isolated" keeps what a pattern leaves unmatched as words of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

# GPT-2 (Radford et al. 2019): contractions, then words, numbers and punctuation, each with one leading space.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SINGLE_DIGIT = r"\p{N}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """patterns are applied one after the other; whole_words takes a word that is in the vocabulary as it is,
    without merging; adds_bos is what the name implies where the file does not say."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((_SINGLE_DIGIT, _GPT2)),
    "llama-bpe": PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True),
    "llama3": PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True),
    "qwen2": PreTokenizer((_QWEN2,)),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
}
