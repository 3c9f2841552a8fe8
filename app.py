"""PageTurn: a chat in the browser with its own inference engine. `python app.py --help` lists the settings.

This file only guards __main__ (worker processes import it again) and stays light: a wrong argument is answered
before anything heavy is imported.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the server until it is told to end, and end the process; returns 2 if something given cannot be used."""
    from app.settings import SettingsError, parse_settings

    try:
        settings = parse_settings()
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from app.launch import run

    run(settings)


if __name__ == "__main__":
    sys.exit(main())
