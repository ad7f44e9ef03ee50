"""Run a notebook in a kernel of this Python, and keep what its cells print.

python -m scripts.execute_notebook examples/octet.ipynb
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def main(path: Path, folder: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of day
        if cell.cell_type == "code":  # bars and paths of this machine
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path.cwd())
