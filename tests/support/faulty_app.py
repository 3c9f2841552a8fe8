"""app.py with a model runner that breaks: `python faulty_app.py KIND FILE <app.py's own arguments>`.

KIND: "hang" (a step never returns) or "device" (from then on the device fails every call). The fault comes once a
request has four tokens, while the number in the file is above 0, and takes 1 off it. Or "loading": nothing breaks, but
the model is not loaded before the file is there.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))


def break_runner(kind: str, faults_left: Path) -> None:
    """Wrap ModelRunner's methods; the watchdog's patience becomes a test's."""
    from engine import watchdog
    from engine.model_runner import ModelRunner

    watchdog.PATIENCE_SECONDS, watchdog.MARGIN, watchdog.TICK_SECONDS = 2.0, 3, 0.1
    launch, check_device = ModelRunner.launch, ModelRunner.check_device
    broken = False

    def faulty_launch(self: ModelRunner, plan: Any) -> Any:
        nonlocal broken
        left = int(faults_left.read_text())
        if left > 0 and not broken and any(item.seq.num_output_tokens > 3 for item in plan.items):
            faults_left.write_text(str(left - 1))
            broken = True
        if broken:
            if kind == "hang":
                threading.Event().wait()
            raise RuntimeError("CUDA error: device-side assert triggered")
        return launch(self, plan)

    def faulty_check(self: ModelRunner) -> None:
        if broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        check_device(self)

    ModelRunner.launch, ModelRunner.check_device = faulty_launch, faulty_check  # type: ignore[method-assign]


def hold_loading(until: Path) -> None:
    from engine import llm_engine

    load = llm_engine.load_parts

    def held(config: Any, progress: Any) -> Any:
        while not until.exists():
            progress("waiting", 50.0)
            time.sleep(0.05)
        return load(config, progress)

    llm_engine.load_parts = held


def main() -> None:
    kind, file, *argv = sys.argv[1:]
    hold_loading(Path(file)) if kind == "loading" else break_runner(kind, Path(file))
    from app.launch import run
    from app.settings import parse_settings

    run(parse_settings(argv))


if __name__ == "__main__":
    main()
