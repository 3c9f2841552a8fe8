"""Settings: flag, environment variable, default and help of every choice made when the server starts.

Each field of the dataclass is one setting. Its flag is the name with dashes, its variable the name in capitals
behind `PAGETURN_`; a flag wins over a variable, a variable over the default. The command line, the variables and
the README's table are all generated from the fields, so that they cannot drift apart. Imports no torch and no
Gradio: a wrong value must be answered at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from engine.config import ATTENTION_BACKENDS, DEVICES, DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, EngineConfig
from engine.shown import shortened, shown

ENV_PREFIX = "PAGETURN_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class SettingsError(ValueError):
    """A setting that cannot be used; the message is one line naming flag or variable, value and what is allowed."""


def _setting(
    default: Any,
    help: str,
    *,
    parse: Callable[[str], Any] = str,
    metavar: str | None = None,
    choices: Sequence[str] | None = None,
    shown_default: str | None = None,
    also_env: str | None = None,
) -> Any:
    """A field with what the command line and the README need; `also_env` names a second, weaker variable."""
    metadata = {
        "help": help,
        "parse": parse,
        "metavar": "|".join(choices) if choices else metavar,
        "shown_default": shown_default,
        "also_env": also_env,
    }
    return field(default=default, metadata=metadata)


def _integer(text: str) -> int:
    try:
        return int(text.strip())
    except ValueError:
        raise ValueError("must be a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("must be a number") from None


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError("must be 1, true, yes, on, 0, false, no or off")
    return word in _TRUE


def _port(text: str) -> int:
    port = _integer(text)
    if not 0 <= port <= 65535:
        raise ValueError("must be between 0 and 65535 (0: any free port)")
    return port


def _seconds(text: str) -> float:
    seconds = _number(text)
    if not 0 < seconds < float("inf"):
        raise ValueError("must be a number of seconds above 0")
    return seconds


def _login(text: str) -> tuple[str, str]:
    user, colon, password = text.partition(":")
    if not (user.strip() and colon and password):
        raise ValueError("must be USER:PASS")
    return user.strip(), password


def _nonempty(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text.strip()


def _folder(text: str) -> Path:
    return Path(_nonempty(text)).expanduser()


def _key(text: str) -> str:
    text = _nonempty(text)
    if not text.isascii() or not text.isprintable():
        raise ValueError("must be printable ASCII, since it travels in an HTTP header")
    return text


def _host_names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in (word.strip().lower().rstrip(".") for word in text.split(",")) if name)
    if not names or not all(re.fullmatch(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*", name) for name in names):
        raise ValueError("must be host names without port, such as chat.example.org, *.example.org or *")
    return names


def _root_path(text: str) -> str:
    path = text.strip().rstrip("/")
    if path and (not path.startswith("/") or "//" in path or any(c in path for c in "?# ")):
        raise ValueError("must be a path such as /chat, without host, query or fragment")
    return path


@dataclass(slots=True)
class Settings:
    """Every setting of the server; `parse_settings` builds and checks it."""

    model: str = _setting(
        "default",
        "The model: `default`, a Hugging Face folder, a .gguf file, or a hub id. "
        "The default is SmolLM2-135M-Instruct on a CPU and Qwen/Qwen3-0.6B on a GPU.",
        parse=_nonempty,
        metavar="NAME|PATH",
    )
    host: str = _setting(
        "127.0.0.1",
        "The address to listen on.",
        parse=_nonempty,
        metavar="HOST",
        shown_default="127.0.0.1; 0.0.0.0 on a hosted Space",
        also_env="GRADIO_SERVER_NAME",
    )
    port: int = _setting(
        7860,
        "The port to listen on; 0 takes any free one.",
        parse=_port,
        metavar="PORT",
        also_env="GRADIO_SERVER_PORT",
    )
    device: str = _setting("auto", "Where the model runs.", choices=DEVICES)
    dtype: str = _setting("auto", "Type of weights, activations and KV cache.", choices=DTYPES)
    tensor_parallel_size: int = _setting(
        1, "Cards to split the model over; on a CPU, processes.", parse=_integer, metavar="N"
    )
    max_model_len: int | None = _setting(
        None, "Tokens of prompt and reply together.", parse=_integer, metavar="N", shown_default="the model's own limit"
    )
    max_num_seqs: int = _setting(64, "Requests that run in one step.", parse=_integer, metavar="N")
    max_num_batched_tokens: int | None = _setting(
        None,
        "Tokens (decodes and prefill chunks) of one step.",
        parse=_integer,
        metavar="N",
        shown_default="8192 on CUDA; on a CPU up to 1024, fewer where a step would take longer than about 0.5 s "
        "(0.3 s beside running streams)",
    )
    kvcache_block_size: int | None = _setting(
        None,
        "Tokens of one KV block.",
        parse=_integer,
        metavar="N",
        shown_default="what the attention backend prefers: 16 for sdpa, 32 for triton, 256 for flash_attn",
    )
    num_kvcache_blocks: int = _setting(
        -1,
        "KV blocks in the pool; -1 sizes it by memory: on a CPU the smaller of 2 GiB and a quarter of what is free.",
        parse=_integer,
        metavar="N",
    )
    gpu_memory_utilization: float = _setting(
        0.9, "Share of a GPU's memory that the engine may use.", parse=_number, metavar="F"
    )
    kv_cache_dtype: str = _setting("auto", "Type of the KV cache, where it differs.", choices=KV_CACHE_DTYPES)
    quantization: str = _setting("auto", "Quantization of the weights.", choices=QUANTIZATIONS)
    attention_backend: str = _setting("auto", "Attention implementation.", choices=ATTENTION_BACKENDS)
    enforce_eager: bool = _setting(
        False, "Launch steps kernel by kernel: no CUDA graphs; on a CPU no C.", parse=_boolean
    )
    abandon_after: float | None = _setting(
        None,
        "End a reply that nobody has watched for this long.",
        parse=_seconds,
        metavar="SECONDS",
        shown_default="never",
    )
    isolate_users: bool = _setting(
        False,
        "Keep users apart in the KV cache: no block that one wrote serves another, nor a request of the API.",
        parse=_boolean,
    )
    data_dir: Path | None = _setting(  # noqa: RUF009  _setting returns a dataclasses.field, as for all others
        None,
        "Folder of the database with users, chats and turns.",
        parse=_folder,
        metavar="DIR",
        shown_default="the platform's data folder; /data on a hosted Space that has it",
    )
    api_key: str | None = _setting(
        None, "Key that clients of /v1 and /kv/snapshot must send.", parse=_key, metavar="KEY", shown_default="none"
    )
    auth: tuple[str, str] | None = _setting(
        None,
        "Login for the page, its socket and /kv/snapshot, which the key opens too where both are set.",
        parse=_login,
        metavar="USER:PASS",
        shown_default="none",
    )
    allowed_hosts: tuple[str, ...] = _setting(
        (),
        "Names by which a server that listens on this machine only may be reached beside localhost, IP addresses and "
        "the machine's own name: what a proxy on this machine passes on as Host; * for any.",
        parse=_host_names,
        metavar="NAME[,NAME...]",
        shown_default="none",
    )
    root_path: str = _setting(
        "", "Path under which a reverse proxy serves the app.", parse=_root_path, metavar="PATH", shown_default="none"
    )

    def engine_config(self) -> EngineConfig:
        """The engine's share of the settings; ValueError as EngineConfig raises it."""
        own = {f.name for f in fields(self)}
        return EngineConfig(**{f.name: getattr(self, f.name) for f in fields(EngineConfig) if f.name in own})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def default_data_dir(env: Mapping[str, str]) -> Path:
    """Where the database goes when nothing names a folder.

    `PAGETURN_HOME` first; on a hosted Space the persistent disk /data where it is mounted (the rest of a Space's
    disk dies with the container); else the platform's folder for application data.
    """
    if home := env.get(ENV_PREFIX + "HOME"):
        return Path(home).expanduser() / "data"
    if env.get("SPACE_ID") and os.access("/data", os.W_OK):
        return Path("/data/pageturn/data")
    if sys.platform == "darwin":
        return Path.home() / "Library/Application Support/pageturn"
    if sys.platform == "win32":
        return Path(env.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "pageturn"
    return Path(env.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "pageturn"


def parse_settings(argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> Settings:
    """Settings from the command line and the environment.

    Raises SettingsError for anything that cannot be used; `--help` prints and exits as argparse does.
    """
    env = os.environ if env is None else env
    given = vars(_parser().parse_args(argv))
    values: dict[str, Any] = {}
    for f in fields(Settings):
        raw = given.get(f.name)
        source = flag(f.name)
        if raw is None:
            for source in filter(None, (variable(f.name), f.metadata["also_env"])):
                raw = env.get(source) or None
                if raw is not None:
                    break
        if raw is not None:
            values[f.name] = _parsed(f.metadata["parse"], source, raw)
    if env.get("SPACE_ID"):
        values.setdefault("host", "0.0.0.0")  # a Space's proxy reaches the container from outside
    values.setdefault("data_dir", default_data_dir(env))
    settings = Settings(**values)
    try:
        settings.engine_config()
    except ValueError as error:
        raise SettingsError(with_flags(str(error))) from None
    return settings


def settings_table() -> str:
    """The README's table of settings, in Markdown."""
    lines = ["| Flag | Variable | Default | What it does |", "|---|---|---|---|"]
    for f in fields(Settings):
        shape = f"{flag(f.name)} {f.metadata['metavar']}" if f.metadata["metavar"] else flag(f.name)
        names = " or ".join(f"`{v}`" for v in filter(None, (variable(f.name), f.metadata["also_env"])))
        lines.append(f"| `{shape.replace('|', chr(92) + '|')}` | {names} | {_default(f)} | {f.metadata['help']} |")
    return "\n".join(lines) + "\n"


def _default(f: Any) -> str:
    if f.metadata["shown_default"]:
        return f.metadata["shown_default"]
    assert f.default is not MISSING
    return "off" if f.default is False else f"`{f.default}`"


def _parsed(parse: Callable[[str], Any], source: str, raw: str) -> Any:
    try:
        return parse(raw)
    except ValueError as error:
        raise SettingsError(f"{source}: {shown(raw)} {error}") from None


def with_flags(message: str) -> str:
    """EngineConfig names its fields; the person at the command line knows them as flags."""
    names = "|".join(f.name for f in fields(EngineConfig))
    return re.sub(rf"\b({names})=", lambda match: f"{flag(match[1])} ", message)


class _Parser(argparse.ArgumentParser):
    """argparse without its usage text on an error: one line, raised, not printed."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            if not word.startswith("-"):
                raise SettingsError(f"unexpected argument {shown(word)}; every setting is a flag, see --help")
            near = difflib.get_close_matches(word, [flag(f.name) for f in fields(Settings)], n=1, cutoff=0.7)
            hint = f"did you mean {near[0]}?" if near else "see --help for the list"
            raise SettingsError(f"unknown flag {shortened(word)}; {hint}")
        return parsed


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="app.py",
        allow_abbrev=False,
        description="PageTurn: chat in the browser with an inference engine inside. "
        f"Every flag is also an environment variable, {variable('max_model_len')} for --max-model-len.",
    )
    for f in fields(Settings):
        help = f"{f.metadata['help']} Default: {_default(f).replace('`', '')}.".replace("%", "%%")
        if f.metadata["parse"] is _boolean:
            parser.add_argument(flag(f.name), dest=f.name, nargs="?", const="1", metavar="BOOL", help=help)
        else:
            parser.add_argument(flag(f.name), dest=f.name, metavar=f.metadata["metavar"], help=help)
    return parser
