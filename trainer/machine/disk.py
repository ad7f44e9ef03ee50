"""Write files so that a crash leaves none half written, and raise one clear error when the disk is full."""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.filesize import decimal as amount

from trainer.errors import CheckpointError, MergeError
from trainer.machine.installed_files import CHECKOUT

FULL = (errno.ENOSPC, errno.EDQUOT)
BROKEN = (errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.ENOLCK, errno.EREMOTEIO)
OF_THE_PATH = (errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EROFS)
REMEDIES = dict.fromkeys(BROKEN, "Check the disk, or the server that it is on, and try again.")
REMEDIES |= {errno.EFBIG: "Its file system, or `ulimit -f`, allows no file of this size."}
REMEDIES |= dict.fromkeys((errno.EACCES, errno.EPERM), "`chmod u+rwX` on it, or on its folder, gives the owner access.")
REMEDIES |= dict.fromkeys(OF_THE_PATH, "See what is at this path.")  # often one from a setting; the error names it
OF_TORCH = ("PytorchStreamWriter", "inline_container.cc", "iostream error")  # texts in errors of torch.save
PROBE_BYTES = 1 << 20
MADE_HERE = "user.octet"  # an extended attribute of a folder, which archives, downloads, cp -r and rsync -a leave out


def failure(error: OSError) -> str:
    """Return a description of an error of a disk or a path, with its remedy; "" for other errors."""
    if error.errno in FULL:
        return f"the disk is full ({error.strerror}). Make room and try again."
    return f"{error.strerror}. {REMEDIES[error.errno]}" if error.errno in REMEDIES else ""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError that has none; only errors of opening a file have it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def writing(folder: Path, what: str, remedy: str, needed: int = 0) -> Iterator[None]:
    """Turn a full or broken disk into a CheckpointError with `remedy`, and delete `folder`, which is new."""
    try:
        yield
    except Exception as error:
        number = _error_of_disk(error, folder)
        if number is None:
            raise
        written = size(folder)
        room = written + shutil.disk_usage(folder.parent).free if folder.parent.is_dir() else 0
        shutil.rmtree(folder, ignore_errors=True)
        if number in FULL:
            wanted = amount(needed) if needed > written else f"more than {amount(written)}"
            state = "the disk is full" if number == errno.ENOSPC else "the quota of the disk is used up"
            reason = f"{state}: {what} needs {wanted}, and {amount(room)} were free"
        else:
            reason = f"{what} cannot be written ({os.strerror(number)})"
            remedy = "Check the disk, or the server that it is on; `--resume` then continues a run"
        raise CheckpointError(folder.parent, reason, remedy) from error


def _error_of_disk(error: BaseException, folder: Path) -> int | None:
    """Return the errno of an error of the disk; None for other errors. safetensors quotes its text. torch says only
    that a file could not be written, so this tries to write one."""
    if isinstance(error, OSError) and error.errno:  # numpy raises one without
        return error.errno if failure(error) or not os.path.isdir(folder) else None
    for number in (*FULL, *REMEDIES):
        if os.strerror(number) in str(error):
            return number
    if not os.path.isdir(folder):  # nothing was written yet, or the folder has disappeared, as torch.save says
        return errno.ENOENT if "Parent directory" in str(error) else None
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * PROBE_BYTES)
    except OSError as cause:
        return cause.errno
    return errno.EIO if any(text in str(error) for text in OF_TORCH) else None


def parsed(text: str | bytes) -> Any:
    """Parse JSON. An integer that is too large for a float becomes infinity, as `1e400` does."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 300 else float(digits))


def follow_umask(*paths: Path) -> None:
    """Give files the permissions of the umask, read from /proc because os.umask() would change it for other threads."""
    if umask := re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE):
        for path in paths:
            path.chmod(0o666 & ~int(umask[1], 8))


def private_folder(path: Path) -> Path:
    """Create a folder that only this user can enter, and return it. Raise if somebody else has created it."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    if not is_private(path):
        raise PermissionError(errno.EPERM, "another user has created this folder, or can enter it", str(path))
    return path


def is_private(path: Path) -> bool:
    """Return True if the path is a folder, not a link, that belongs to this user and that nobody else can enter."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def mark_as_made_here(folder: Path) -> None:
    with suppress(OSError):  # a file system without extended attributes
        os.setxattr(folder, MADE_HERE, b"%d" % folder.stat().st_ino)  # a copy has another number


def is_made_here(folder: Path) -> bool:
    """Return True for a run folder that Octet has made for this user, and that is no copy, or that comes with Octet."""
    with suppress(OSError):
        status = folder.stat()
        return status.st_uid == os.geteuid() and os.getxattr(folder, MADE_HERE) == b"%d" % status.st_ino
    return folder.resolve().parent == CHECKOUT.resolve() / "gallery"


def keep(path: Path) -> None:
    """Sync a file or a folder to the disk, and drop its cached pages, so that the next read comes from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def not_a_link(path: str, flags: int) -> int:
    """Open a file for `open(opener=)`, but not through a link, which could redirect the output to another file."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def is_locked(path: Path) -> bool:
    """Return True while another process holds the lock of a file, as far as files can be locked there."""
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def replace(path: Path, content: bytes) -> None:
    """Replace a file, or a link, atomically: a crash leaves either the old or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    with naming(path):
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:
            file.write(content)
        keep(partial)
        partial.replace(path)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def named_when_checked(path: Path) -> Iterator[Path]:
    """Yield a temporary name, `*.unchecked`, under which a file or a folder is written and checked, and which it keeps
    if the process ends meanwhile. It is then renamed to `path`, or to `*.refused` if the check raises MergeError. Raise
    CheckpointError if another process of this machine is writing to `path`, or has done so."""
    path = path.absolute()
    with claimed(path, "Name another --out"):
        if path.is_dir() and any(path.iterdir()):
            raise CheckpointError(path, "another command has written it meanwhile", "Name another --out")
        unchecked, refused = (path.with_name(f"{path.name}.{ending}") for ending in ("unchecked", "refused"))
        for earlier in filter(Path.is_dir, (unchecked, refused)):
            shutil.rmtree(earlier)
        try:
            yield unchecked
        except MergeError as error:
            if unchecked.exists():
                unchecked.rename(refused)
                error.args = (f"{error} It is kept as {refused}.",)
            raise
        unchecked.rename(path)


@contextmanager
def claimed(path: Path, remedy: str) -> Iterator[None]:
    """Claim a path, until the block or the process ends. Raise CheckpointError if another process here has done so."""
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0octet-{sha256(bytes(path.absolute())).hexdigest()}")
        except OSError:
            raise CheckpointError(path, "another command is writing it", remedy) from None
        yield


def size(folder: Path) -> int:
    """Return the bytes of all files in a folder, of which a run may remove some meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total
