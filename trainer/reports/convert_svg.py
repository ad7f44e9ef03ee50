"""Convert a picture from SVG to PDF or PNG, by a program of this machine."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.machine.safe_text import print

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")  # they can render an SVG as a PNG
BROWSER_S = 60.0  # seconds after which a browser counts as stuck


def converted(svg: bytes, place: Path, kind: str) -> bytes | None:
    """Return a picture as PDF or PNG. If no program here can convert it, print what to install and return None."""
    for converter in (["rsvg-convert", "-f", kind], ["cairosvg", "-f", kind, "-"]):  # from stdin to stdout
        if shutil.which(converter[0]):
            made = subprocess.run(converter, input=svg, capture_output=True, check=False)
            if made.returncode == 0:
                return made.stdout
    if kind == "png" and (picture := _rendered_by_browser(svg)):
        return picture
    source, target = (shlex.quote(f"{place}.{end}") for end in ("svg", kind))
    remedy = f"`pip install cairosvg`, then `cairosvg {source} -o {target}`"
    print(f"octet: only an SVG, because no program here converts it. Try {remedy}", file=sys.stderr)
    return None


def _rendered_by_browser(svg: bytes) -> bytes | None:
    """Return a picture as PNG if a browser is installed that can render it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    size = re.search(rb'width="(\d+)[.\d]*" height="(\d+)', svg)
    if not browser or not size:
        return None
    with TemporaryDirectory(prefix="octet-") as folder:
        source, target = Path(folder) / "source.svg", Path(folder) / "target.png"
        source.write_bytes(svg)
        options = ["--headless", "--hide-scrollbars", f"--user-data-dir={folder}/profile", f"--screenshot={target}"]
        options += ["--no-sandbox"] * (os.geteuid() == 0)  # as root, Chromium does not start with its sandbox
        command = [browser, *options, f"--window-size={','.join(side.decode() for side in size.groups())}"]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([*command, source.as_uri()], capture_output=True, check=False, timeout=BROWSER_S)
        return target.read_bytes() if target.is_file() else None
