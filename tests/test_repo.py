"""What the repository promises about itself: the README, the pinned requirements, the files' sizes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from app.settings import settings_table

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_FILE_BYTES = 2**20
OWN = {"app", "engine", "models"} | {path.stem for path in ROOT.glob("bench*.py")}


def tracked_files() -> list[Path]:
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        pytest.skip(f"not a git checkout: {git.stderr.strip()}")
    return [ROOT / name for name in git.stdout.split("\0") if name and (ROOT / name).is_file()]


def requirements(name: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in lines if line]


def pinned_names(name: str) -> set[str]:
    """Distribution names as packaging normalises them (PEP 503)."""
    pins = [line for line in requirements(name) if not line.startswith("-r ")]
    return {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in pins}


def front_matter() -> dict[str, str]:
    start, block, _ = README.split("---\n", 2)
    assert start == "", "the front matter must be the first thing in README.md"
    return dict(re.findall(r"^(\w+):\s*(.*)$", block, re.MULTILINE))


def test_the_settings_table_in_the_readme_is_the_settings_own() -> None:
    assert settings_table() in README


@pytest.mark.parametrize(
    "command",
    ["pip install -r requirements.txt && python app.py", "pip install -r tests/requirements.txt && pytest"],
)
def test_the_readme_gives_each_command_on_a_line_of_its_own(command: str) -> None:
    assert README.splitlines().count(command) == 1


def test_the_front_matter_has_what_a_hosted_space_reads() -> None:
    front = front_matter()
    wanted = "title emoji colorFrom colorTo sdk sdk_version python_version app_file suggested_hardware "
    wanted += "startup_duration_timeout preload_from_hub license short_description"
    assert front.keys() >= set(wanted.split())
    assert (front["sdk"], front["app_file"], front["license"]) == ("gradio", "app.py", "apache-2.0")
    assert f"gradio=={front['sdk_version']}" in requirements("requirements.txt")
    assert len(front["short_description"]) <= 60, "a Space refuses a longer one"
    colours = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
    assert {front["colorFrom"], front["colorTo"]} <= colours


def test_every_folder_and_file_that_the_readme_names_exists() -> None:
    named = re.findall(r"\b(?:app|engine|models|tests|docs)/[\w./-]*\w\.\w+|\b\w+\.py\b", README)
    assert len(named) > 10
    known = {path.name for path in ROOT.rglob("*.py")}
    missing = [name for name in named if not ((ROOT / name).exists() or name in known)]
    assert not missing


@pytest.mark.parametrize("name", ["requirements.txt", "tests/requirements.txt"])
def test_every_requirement_is_pinned_to_one_version(name: str) -> None:
    lines = requirements(name)
    if name.startswith("tests/"):
        assert lines.pop(0) == "-r ../requirements.txt"
    assert lines
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==\d[\w.]*( ; .+)?", line)] == []


@pytest.mark.parametrize(
    ("folders", "pins"),
    [
        (["app.py", "example.py", "app", "engine", "models"], ["requirements.txt"]),
        (["tests"], ["requirements.txt", "tests/requirements.txt"]),
    ],
)
def test_every_imported_package_is_a_requirement(folders: list[str], pins: list[str]) -> None:
    pinned = set[str]().union(*map(pinned_names, pins))
    distributions = packages_distributions()
    files = [f for name in folders for f in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))]
    local = OWN | {path.stem for path in (ROOT / "tests").rglob("*.py")} | {"tests"}
    unpinned = {}
    for path in files:
        for package in imported_packages(path) - set(sys.stdlib_module_names) - local:
            providers = {re.sub(r"[-_.]+", "-", d).lower() for d in distributions.get(package, [package])}
            if not providers & pinned:
                unpinned[package] = str(path.relative_to(ROOT))
    assert unpinned == {}


def imported_packages(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_models_and_engine_import_nothing_of_the_app_or_its_frameworks() -> None:
    above = {"app", "gradio", "fastapi", "starlette", "uvicorn"}
    for folder, forbidden in (("engine", above), ("models", above | {"engine"})):
        for path in (ROOT / folder).rglob("*.py"):
            assert not imported_packages(path) & forbidden, path


def test_no_tracked_file_is_larger_than_a_mebibyte() -> None:
    assert [path for path in tracked_files() if path.stat().st_size > MAX_FILE_BYTES] == []


def test_no_directory_of_tests_is_a_package_that_would_shadow_the_real_one() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
