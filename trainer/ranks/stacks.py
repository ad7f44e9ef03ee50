"""Where the threads of this process are, for an error that names a rank that is stuck."""

from __future__ import annotations

import faulthandler
import sys
import sysconfig
import threading
import traceback
from contextlib import suppress
from pathlib import Path

COLLECTIVE = "/torch/distributed/"  # in the path of a file, where the main thread waits for other ranks
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def place() -> str:
    """Return the line that the main thread is at, outside of libraries; "" while it waits in a collective."""
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])  # type: ignore[index]
    if any(COLLECTIVE in frame.filename for frame in stack):
        return ""
    own = [frame for frame in stack if not frame.filename.startswith(LIBRARIES)]
    last = (own or stack)[-1]
    return f"{Path(last.filename).name}:{last.lineno} in {last.name}"


def write(folder: Path, rank: int, error: BaseException | None = None) -> None:
    """Write the stacks of all threads into a file of this rank, after the traceback of its error."""
    with suppress(OSError):  # a disk that is full must not hide the error
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{rank}.txt"
        path.unlink(missing_ok=True)  # a link would lead elsewhere
        with path.open("x") as file:
            if error:
                traceback.print_exception(error, file=file)
                file.flush()
            faulthandler.dump_traceback(file)
