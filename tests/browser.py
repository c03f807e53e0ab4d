"""A page as a real browser shows it."""

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


def browse(page: Path, *options: str) -> str:
    """What headless chromium prints for the page, with no network but files."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
               "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={page.parent / 'browser'}", "--timeout=20000",
               *options, page.resolve().as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def dom_after(page: Path, script: str = "") -> str:
    """The page's DOM after `script` has run in it, as a user's clicks would."""
    acted = page.with_name(f"acted-{page.name}")
    acted.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    return browse(acted, "--dump-dom")


def screenshot(page: Path, to: Path, width: int = 1280, height: int = 1000) -> None:
    browse(page, f"--screenshot={to.resolve()}", f"--window-size={width},{height}", "--hide-scrollbars")
    assert to.stat().st_size > 10_000
