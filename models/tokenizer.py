"""Tokenizer: text to token ids and back, from a GGUF file or from a folder's tokenizer.json. Loads no torch.

Special tokens never come out of plain text by accident: the underlying BPE knows only ordinary tokens (and the
ones a file declares as user-defined, such as <think>), and special ids are placed by splitting the text at
their strings, which happens only where the caller asked for it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders
from tokenizers.models import BPE

from models.chat_template import Piece, render_chat
from models.gguf import GGUFError, GGUFFile
from models.pretokenizers import PRE_TOKENIZERS

# ggml token types
_CONTROL, _USER_DEFINED = 3, 4


_PLAIN_CHARACTERS = 8  # a token of ordinary text has fewer
_CUT_TOKENS = 64  # more than come of cutting a text in the middle of a word


class TokenizerError(ValueError):
    """Tokenizer files that cannot be used: damaged, or of a kind that is not supported."""


class Tokenizer:
    """Byte-level BPE (or whatever a tokenizer.json holds) with the model's special tokens and chat template.

    vocab_size     ids are 0 .. vocab_size - 1; the model's embedding may have more rows
    adds_bos       the model expects one begin-of-sequence token before every prompt
    eos_token_ids  ids that end a turn
    special_ids    control tokens: they show nothing and are never typed
    fingerprint    hex of vocabulary, merges, special tokens and template: where two are equal, so are the encodings
    """

    def __init__(
        self,
        bpe: tokenizers.Tokenizer,
        *,
        special: dict[str, int],
        special_strip: dict[str, tuple[bool, bool]] | None = None,
        named: dict[str, str] | None = None,
        bos_token_id: int | None,
        eos_token_ids: Iterable[int],
        adds_bos: bool,
        chat_template: str | None,
        byte_level: bool,
        fingerprint: str,
    ) -> None:
        """special: string -> id of every control token. special_strip: strings that swallow white space to the
        (left, right). named: the template's variables, such as "bos_token"."""
        self._bpe = bpe
        self._special = special
        self._special_strings = {i: s for s, i in special.items()}
        self._named = named or {}
        self._byte_level = byte_level
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = max(bpe.get_vocab_size(with_added_tokens=True), max(special.values(), default=-1) + 1)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.special_ids = frozenset(special.values())
        self.adds_bos = adds_bos and bos_token_id is not None
        self.chat_template = chat_template
        self.fingerprint = fingerprint
        self._split = _splitter(special, special_strip or {})
        self._user_defined = {
            i: t.content for i, t in bpe.get_added_tokens_decoder().items() if i not in self.special_ids
        }

    # ------------------------------------------------------------------ encode

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids of a text. parse_special turns special-token strings in it into their ids; without it they
        are ordinary text. add_bos puts the begin-of-sequence id first, unless the text already begins with it
        or the model has none."""
        ids = self._encode_pieces(self._pieces(text)) if parse_special else self._encode_plain(text)
        if add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def least_tokens(self, text: str, limit: int) -> int:
        """A number of tokens that the text has at least, and no less than `limit` where that is plain from its
        beginning; 0 for a short text. To refuse what is far too long without holding up the whole process: tokenizing
        keeps the interpreter's lock, for half a minute for eight million digits."""
        beginning = text[: _PLAIN_CHARACTERS * limit]
        if len(beginning) == len(text):
            return 0
        return max(0, len(self.encode(beginning)) - _CUT_TOKENS)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation through the model's chat template; models.chat_template has the rules.

        Special-token strings typed inside a message stay ordinary text. An assistant message may carry
        "token_ids", which then stand for its content as they are. Raises ValueError where the model has no
        template, a message is malformed, or the template refuses the conversation.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template; use plain completion")
        for index, message in enumerate(messages):
            self._check_ids(index, message.get("token_ids"))
        rendered = render_chat(
            self.chat_template,
            messages,
            special=self._split,
            variables=self._named,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs or {},
        )
        ids = self._encode_pieces(piece for part in rendered for piece in self._rendered_pieces(part))
        if self.adds_bos and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            ids.insert(0, self.bos_token_id)
        return ids

    def _rendered_pieces(self, part: Piece) -> Iterable[str | int | list[int]]:
        """Cuts the template's own text at special tokens; what was typed is unmasked only after that."""
        if isinstance(part, list):
            yield part
            return
        for piece in self._pieces(part.text):
            yield part.unmask(piece) if isinstance(piece, str) else piece

    def _pieces(self, text: str) -> Iterable[str | int]:
        """The text in order: plain strings, and ids where a special token's string stood."""
        if self._split is None:
            yield text
            return
        at = 0
        for match in self._split.finditer(text):
            if match.start() > at:
                yield text[at : match.start()]
            yield self._special[match.group(match.lastindex or 0)]
            at = match.end()
        if at < len(text):
            yield text[at:]

    def _encode_pieces(self, pieces: Iterable[str | int | list[int]]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, str):
                ids += self._encode_plain(piece)
            elif isinstance(piece, list):
                ids += piece
            else:
                ids.append(piece)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        # Lone surrogates cannot be UTF-8; they become U+FFFD, as a browser would send them.
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._bpe.encode(text, add_special_tokens=False).ids

    def _check_ids(self, index: int, ids: object) -> None:
        if ids is None:
            return
        if not isinstance(ids, (list, tuple)):
            raise ValueError(f"messages[{index}].token_ids is {type(ids).__name__}; it must be a list of integers")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"messages[{index}].token_ids holds {token!r}; ids are integers from 0 to {self.vocab_size - 1}"
                )

    # ------------------------------------------------------------------ decode

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids. Bytes that are not valid UTF-8 show as U+FFFD. Ids past the vocabulary (padding
        rows of the embedding) show nothing."""
        if self._byte_level:
            out = bytearray()
            for token in ids:
                if token in self.special_ids:
                    if not skip_special_tokens:
                        out += self._special_strings[token].encode("utf-8", "replace")
                else:
                    out += self._raw(token)
            return out.decode("utf-8", "replace")
        if skip_special_tokens:
            return self._bpe.decode([t for t in ids if t not in self.special_ids], skip_special_tokens=False)
        return self._bpe.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes one token stands for; b"" for special tokens and ids past the vocabulary; None where the
        tokenizer is not byte-level, so that only decode() of the whole sequence is right."""
        if not self._byte_level:
            return None
        return b"" if token_id in self.special_ids else self._raw(token_id)

    def _raw(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            if token in self._user_defined:
                known = self._user_defined[token].encode("utf-8", "replace")
            else:
                text = self._bpe.id_to_token(token) or ""
                known = b"".join(_BYTE_OF.get(char) or char.encode("utf-8", "replace") for char in text)
            self._bytes[token] = known
        return known

    # ------------------------------------------------------------------ load

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """The tokenizer inside a GGUF file. Raises GGUFError for missing or contradictory metadata and for a
        tokenizer model or pre-tokenizer that is not supported, naming it."""
        kind = file.require("tokenizer.ggml.model", str)
        if kind != "gpt2":
            raise GGUFError(f"{file.path}: tokenizer model {kind!r} is not supported; 'gpt2' (byte-level BPE) is")
        pre_name = file.get("tokenizer.ggml.pre", str, "missing")
        if pre_name not in PRE_TOKENIZERS:
            raise GGUFError(
                f"{file.path}: pre-tokenizer {pre_name!r} is not supported; {', '.join(PRE_TOKENIZERS)} are"
            )
        pre = PRE_TOKENIZERS[pre_name]
        tokens = file.require("tokenizer.ggml.tokens", list)
        merges = file.require("tokenizer.ggml.merges", list)
        types = file.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
        if len(types) != len(tokens):
            raise GGUFError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types")
        vocab = {token: i for i, token in enumerate(tokens)}
        try:
            pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
            bpe = tokenizers.Tokenizer(BPE(vocab, pairs, ignore_merges=pre.whole_words))
        except Exception as error:  # the Rust side raises plain Exception
            raise GGUFError(f"{file.path}: the merges do not fit the vocabulary: {error}") from error
        bpe.pre_tokenizer = pre.build()
        bpe.decoder = decoders.ByteLevel()
        bpe.add_tokens([AddedToken(tokens[i], normalized=False) for i, t in enumerate(types) if t == _USER_DEFINED])
        special = {tokens[i]: i for i, t in enumerate(types) if t == _CONTROL}

        def token_id(name: str) -> int | None:
            value = file.get(f"tokenizer.ggml.{name}_token_id", int, None)
            if value is not None and not 0 <= value < len(tokens):
                raise GGUFError(f"{file.path}: {name}_token_id {value} is outside the {len(tokens)} tokens")
            return value

        bos, eos = token_id("bos"), token_id("eos")
        named = {f"{name}_token": tokens[i] for name, i in (("bos", bos), ("eos", eos)) if i is not None}
        for name, key in (("pad", "padding"), ("unk", "unknown")):
            found = token_id(key)
            if found is not None:
                named[f"{name}_token"] = tokens[found]
        template = file.get("tokenizer.chat_template", str, None)
        digest = hashlib.sha256("\x1f".join((pre_name, *tokens, *merges)).encode("utf-8", "surrogateescape"))
        digest.update(repr((sorted(special.items()), template)).encode("utf-8", "surrogateescape"))
        return cls(
            bpe,
            special=special,
            named=named,
            bos_token_id=bos,
            eos_token_ids=[i for i in (eos, token_id("eot"), token_id("eom")) if i is not None],
            adds_bos=file.get("tokenizer.ggml.add_bos_token", bool, pre.adds_bos),
            chat_template=template,
            byte_level=True,
            fingerprint=digest.hexdigest()[:16],
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer of a Hugging Face folder (tokenizer.json, tokenizer_config.json and the chat template
        beside it); None if the folder has none. Raises TokenizerError for damaged files, and for a folder with
        only files of a slow tokenizer."""
        path = folder / "tokenizer.json"
        if not path.exists():
            for slow in ("tokenizer.model", "vocab.json", "spiece.model"):
                if (folder / slow).exists():
                    raise TokenizerError(
                        f"{folder}: has {slow} but no tokenizer.json; save the fast tokenizer there "
                        "(AutoTokenizer.from_pretrained(folder).save_pretrained(folder))"
                    )
            return None
        content = path.read_bytes()
        try:
            bpe = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the Rust side raises plain Exception
            raise TokenizerError(f"{path}: not a tokenizer.json that can be read: {error}") from error
        config = read_json(folder / "tokenizer_config.json") or {}
        added = bpe.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        strip = {t.content: (t.lstrip, t.rstrip) for t in added.values() if t.special and (t.lstrip or t.rstrip)}
        # Special strings in plain text are to be encoded as what they spell; this object does the splitting.
        bpe.encode_special_tokens = True
        named = {key: text for key, value in config.items() if key.endswith("_token") and (text := _content(value))}
        bos = bpe.token_to_id(named["bos_token"]) if "bos_token" in named else None
        eos = [bpe.token_to_id(named["eos_token"])] if "eos_token" in named else []
        for source in ("generation_config.json", "config.json"):
            eos += eos_ids((read_json(folder / source) or {}).get("eos_token_id"))
        template = _folder_template(folder, config)
        digest = hashlib.sha256(content)
        digest.update(repr((sorted(special.items()), template)).encode("utf-8", "surrogateescape"))
        first = bpe.encode("", add_special_tokens=True).ids[:1]
        return cls(
            bpe,
            special=special,
            special_strip=strip,
            named=named,
            bos_token_id=bos,
            eos_token_ids=[i for i in eos if i is not None],
            adds_bos=bos is not None and first == [bos],
            chat_template=template,
            byte_level="ByteLevel" in str(bpe.decoder),
            fingerprint=digest.hexdigest()[:16],
        )


def eos_ids(value: object) -> list[int]:
    """config.json's eos_token_id, which is a number, a list of numbers or null, as a list."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    return [v for v in value if isinstance(v, int)] if isinstance(value, list) else []


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None when there is no such file; TokenizerError when it is damaged."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: holds {type(value).__name__}; expected a JSON object")
    return value


def _folder_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json's; of several named ones it is "default"."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    template = config.get("chat_template") or (read_json(folder / "chat_template.json") or {}).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _content(value: object) -> str | None:
    """A special token in tokenizer_config.json: its string, or an object with "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _splitter(special: dict[str, int], strip: dict[str, tuple[bool, bool]]) -> re.Pattern[str] | None:
    """A pattern that finds special tokens, longest first, each string in a group of its own."""
    if not special:
        return None
    parts = []
    for text in sorted(special, key=len, reverse=True):
        left, right = strip.get(text, (False, False))
        parts.append((r"\s*" if left else "") + f"({re.escape(text)})" + (r"\s*" if right else ""))
    return re.compile("|".join(parts))


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, bytes]:
    """GPT-2's printable stand-in for each byte (Radford et al. 2019): printable ones are themselves, the rest
    follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + n): bytes([byte]) for n, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_table()
