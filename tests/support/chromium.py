"""Where a Chromium is on this machine, without starting anything."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

# First the one without windows, which starts and draws with less: of Debian's packages it is one of its own.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chromium() -> str | None:
    """The path of an installed Chromium, else of Playwright's own newest one, else None."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    own = sorted(cache.glob("chromium-*/chrome-linux*/chrome"))
    return str(own[-1]) if own else None
