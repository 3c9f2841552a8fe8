"""The command line, the environment and the table that the README shows."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from app.settings import Settings, SettingsError, flag, parse_settings, settings_table, variable
from engine.config import EngineConfig

ENGINE_ONLY = {"seed", "enable_prefix_caching"}  # for Python users; no flag


def parse(*argv: str, **env: str) -> Settings:
    return parse_settings(list(argv), env)


def refusal(*argv: str, **env: str) -> str:
    with pytest.raises(SettingsError) as caught:
        parse(*argv, **env)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_without_arguments_it_listens_on_this_machine_only() -> None:
    settings = parse()
    assert (settings.host, settings.port) == ("127.0.0.1", 7860)
    assert settings.api_key is None and settings.auth is None and settings.abandon_after is None


def test_defaults_of_the_command_line_are_the_engine_s_own() -> None:
    assert parse().engine_config() == EngineConfig()


def test_every_field_of_the_engine_has_a_flag() -> None:
    missing = {f.name for f in fields(EngineConfig)} - {f.name for f in fields(Settings)}
    assert missing == ENGINE_ONLY


EXAMPLES = {
    "model": ("some/model", "some/model"),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("8001", 8001),
    "device": ("cpu", "cpu"),
    "dtype": ("float32", "float32"),
    "tensor_parallel_size": ("1", 1),
    "max_model_len": ("512", 512),
    "max_num_seqs": ("4", 4),
    "max_num_batched_tokens": ("256", 256),
    "kvcache_block_size": ("32", 32),
    "num_kvcache_blocks": ("100", 100),
    "gpu_memory_utilization": ("0.5", 0.5),
    "kv_cache_dtype": ("auto", "auto"),
    "quantization": ("none", "none"),
    "attention_backend": ("sdpa", "sdpa"),
    "enforce_eager": ("true", True),
    "abandon_after": ("30", 30.0),
    "isolate_users": ("yes", True),
    "data_dir": ("/tmp/elsewhere", Path("/tmp/elsewhere")),
    "api_key": ("k3y", "k3y"),
    "auth": ("ada:love:lace", ("ada", "love:lace")),
    "allowed_hosts": ("Chat.example.org, *.example.net.", ("chat.example.org", "*.example.net")),
    "root_path": ("/x/", "/x"),
}


@pytest.mark.parametrize("name", [f.name for f in fields(Settings)])
def test_each_setting_can_be_given_as_flag_and_as_variable(name: str) -> None:
    text, value = EXAMPLES[name]
    extra = ("--max-num-seqs", "4") if name == "max_num_batched_tokens" else ()
    assert getattr(parse(flag(name), text, *extra), name) == value
    assert getattr(parse(*extra, **{variable(name): text}), name) == value


def test_a_flag_wins_over_a_variable_and_ours_over_gradio_s() -> None:
    env = {"PAGETURN_PORT": "8001", "GRADIO_SERVER_PORT": "8002", "GRADIO_SERVER_NAME": "::1"}
    assert parse("--port", "8000", **env).port == 8000
    assert parse(**env).port == 8001
    assert parse(GRADIO_SERVER_PORT="8002").port == 8002
    assert parse(**env).host == "::1"


def test_an_empty_variable_counts_as_unset() -> None:
    assert parse(PAGETURN_PORT="", PAGETURN_API_KEY="").port == 7860


def test_on_a_space_it_listens_to_the_outside_unless_told() -> None:
    assert parse(SPACE_ID="someone/space").host == "0.0.0.0"
    assert parse("--host", "127.0.0.1", SPACE_ID="someone/space").host == "127.0.0.1"


def test_the_data_folder_follows_pageturn_home(tmp_path: Path) -> None:
    assert parse(PAGETURN_HOME=str(tmp_path)).data_dir == tmp_path / "data"
    assert parse(XDG_DATA_HOME=str(tmp_path)).data_dir is not None


def test_enforce_eager_needs_no_value() -> None:
    assert parse("--enforce-eager").enforce_eager is True
    assert parse("--enforce-eager=off", PAGETURN_ENFORCE_EAGER="1").enforce_eager is False


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--prot", "1"), ("--prot", "--port")),
        (("--max-model-length=5",), ("--max-model-length", "--max-model-len")),
        (("--zzz",), ("--zzz", "--help")),
        (("model.gguf",), ("'model.gguf'",)),
        (("--port",), ("--port",)),
        (("--port", "http"), ("--port", "'http'", "whole number")),
        (("--port", "70000"), ("--port", "'70000'", "65535")),
        (("--dtype", "int7"), ("--dtype", "'int7'", "float32")),
        (("--max-num-seqs", "0"), ("--max-num-seqs", "0", "at least 1")),
        (("--max-model-len", "1"), ("--max-model-len", "1", "at least 2")),
        (("--max-num-batched-tokens", "8"), ("--max-num-batched-tokens", "8", "--max-num-seqs", "64")),
        (("--gpu-memory-utilization", "1.5"), ("--gpu-memory-utilization", "1.5", "at most 1")),
        (("--gpu-memory-utilization", "nan"), ("--gpu-memory-utilization", "nan")),
        (("--abandon-after", "0"), ("--abandon-after", "'0'", "above 0")),
        (("--abandon-after", "nan"), ("--abandon-after", "'nan'")),
        (("--auth", "ada"), ("--auth", "USER:PASS")),
        (("--root-path", "http://x/y"), ("--root-path", "http://x/y")),
        (("--api-key", "schlüssel"), ("--api-key", "ASCII")),
        (("--enforce-eager=maybe",), ("--enforce-eager", "'maybe'")),
        (("--kv-cache-dtype", "fp8"), ("--kv-cache-dtype", "'fp8'", "not available yet", "'auto'")),
        (("--quantization", "int4"), ("--quantization", "'int4'", "not available yet")),
        (("--tensor-parallel-size", "0"), ("--tensor-parallel-size", "0", "at least 1")),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line_with_name_value_and_range(
    argv: tuple[str, ...], words: tuple[str, ...]
) -> None:
    message = refusal(*argv)
    assert all(word in message for word in words), message


def test_a_wrong_variable_is_refused_by_the_variable_s_name() -> None:
    message = refusal(PAGETURN_PORT="http")
    assert "PAGETURN_PORT" in message and "'http'" in message
    assert "GRADIO_SERVER_PORT" in refusal(GRADIO_SERVER_PORT="-1")


def test_an_abbreviated_flag_is_not_guessed() -> None:
    assert "--max-num" in refusal("--max-num", "4")


def test_the_table_has_one_row_for_each_setting() -> None:
    rows = settings_table().splitlines()[2:]
    assert len(rows) == len(fields(Settings))
    for row, f in zip(rows, fields(Settings), strict=True):
        assert row.startswith(f"| `{flag(f.name)}") and f"`{variable(f.name)}`" in row


def test_help_lists_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(flag(f.name) in text for f in fields(Settings))
    assert "Default: 7860" in text


def test_reading_the_settings_imports_neither_torch_nor_gradio() -> None:
    code = "import sys, app.settings as s; s.parse_settings([]); print({'torch','gradio','numpy'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "set()"
