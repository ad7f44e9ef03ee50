"""`python ...` as a fork of a process that has imported torch, transformers, peft and deepspeed already.

`subprocess.run([*forked(), "train.py", "--preset", "nano"], ...)` is what `[sys.executable, "train.py", ...]` would be,
without seconds of imports. Three processes take part. The server, one for all workers of pytest, imports and then waits
for requests. The client, which subprocess starts in place of the program, hands its arguments, environment, working
directory, standard input and outputs to the server, passes signals on, and ends as the program ends. The program is a
fork of the server: its exceptions, exit functions and exit status are those of a Python process of its own.

Where a variable that the libraries read while they are imported differs from the server's, the client becomes the
program itself. A test about starting, imports or the launcher takes `sys.executable` anyway.
"""

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

READ_BY_IMPORTS = ("CUDA_", "DS_", "HF_", "HOME", "LD_", "MKL_", "OMP_", "PYTHON", "TMP", "TRANSFORMERS_", "XDG_")
READ_BY_IMPORTS += ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
NOT_READ = ("PYTHONPATH", "HF_TOKEN", "CUDA_DEVICE_ORDER")  # the last is set by every command, and by the server
IMPORTED = ["bitsandbytes", "datasets", "deepspeed", "peft", "safetensors.torch", "torch.utils.tensorboard", "train"]
IMPORTED += ["transformers.models.qwen2.modeling_qwen2", "trainer.run.evaluate_models", "trainer.run.job"]
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_address: list[str] = []  # of the server, once it is started
_servers: list[Any] = []  # the process, in the worker that has started it


def forked() -> list[str]:
    """Return the beginning of a command, to stand where `sys.executable` would. The first call starts the server."""
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    if not _address:
        _address.append(f"octet-tests-{owner}")  # of an abstract socket: no file is left behind
        _start_server(owner, _address[0])
    return [sys.executable, "-IS", __file__, *_address]


def _start_server(owner: int, address: str) -> None:
    """Start the server, which ends with its owner, unless another worker of pytest has started it."""
    import subprocess
    from pathlib import Path

    with socket.socket(socket.AF_UNIX) as listener, suppress(OSError):  # the address is in use already
        listener.bind(f"\0{address}")
        listener.listen(64)
        command = [sys.executable, "-m", "tests.forks", str(listener.fileno()), str(owner)]
        root, numbers = Path(__file__).parent.parent, [listener.fileno()]
        _servers.append(
            subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=numbers)
        )


# ---------------------------------------------------------------- the client


def ask(address: str, arguments: list[str]) -> None:
    """Have the server run a program with these arguments of `python`, and end as it ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"\0{address}")
        request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
        message = json.dumps(request).encode()
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: server.send(bytes([number])))
        socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(message)
        answer = server.recv(64).decode()
    if answer == "start it yourself":
        os.execv(sys.executable, [sys.executable, *arguments])
    if not answer:
        sys.exit("the fork server has ended")
    status = int(answer)
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# ---------------------------------------------------------------- the server


def serve(listener: socket.socket, owner: int) -> None:
    """Answer the requests of clients. Return when the owner has ended and, in each fork, when its program has."""
    _import_everything()
    imported_with, ended = _read_by_imports(os.environ), os.pidfd_open(owner)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks that answer
    while ended not in select.select([listener, ended], [], [])[0]:
        client, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _answer(client, imported_with, ended)
            return
        client.close()


def _answer(client: socket.socket, imported_with: Mapping[str, str], owner_ended: int) -> None:
    """Run the program of a request in a fork, tell the client how it has ended, and exit. Only the fork returns."""
    request, files = _receive(client)
    if request and _read_by_imports(request["environment"]) != imported_with:
        client.send(b"start it yourself")
    elif request:
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs without
            client.close()
            os.close(owner_ended)
            _become(request, files)
            return
        for file in files:
            os.close(file)
        _attend(process, client, owner_ended)
    os._exit(0)


def _attend(process: int, client: socket.socket, owner_ended: int) -> None:
    """Send a program the signals that its client is sent, until it ends. It is ended with its client or the owner."""
    program, watched = os.pidfd_open(process), [client.fileno(), owner_ended]
    while program not in (ready := select.select([program, *watched], [], [])[0]):
        received = client.recv(1) if client.fileno() in ready else b""
        os.kill(process, received[0] if received else signal.SIGKILL)
        watched = watched if received else []
    with suppress(OSError):  # the client may be gone
        client.send(str(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])).encode())


def _import_everything() -> None:
    """In the order of train.py, which silences some warnings first."""
    import gc
    import importlib

    from trainer.machine import hardware, quiet

    hardware.prepare_cuda()
    quiet.quiet()
    for name in IMPORTED:
        importlib.import_module(name)

    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from trainer.problem.word_problems import NanoTask

    NanoTask().train()  # what most programs make, and keep: a sixth of the time of a short run
    get_checkpoint_conversion_mapping("qwen2")
    gc.freeze()  # what is shared by all forks stays so


def _read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith(READ_BY_IMPORTS)}
    return {name: value for name, value in found.items() if name not in NOT_READ}


def _receive(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return a request and its files, or None and its files if the client has ended before it was whole."""
    size, files, _, _ = socket.recv_fds(client, 8, 3)
    length = int.from_bytes(size, "big")
    message = client.recv(length, socket.MSG_WAITALL)
    return json.loads(message) if size and len(message) == length else None, files


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Run the program in this process. What it raises ends the process as it would end any other."""
    import runpy
    import types

    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115  those of the server have been other files
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path and path not in sys.path[1:]]
    what, *rest = request["arguments"]
    if what == "-m":
        sys.path[:1], sys.argv = [os.getcwd(), *paths], rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.path[:1], sys.argv = ["", *paths], ["-c", *rest[1:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(rest[0], sys.modules["__main__"].__dict__)  # noqa: S102  what `python -c` does
    else:
        sys.path[:1], sys.argv = [os.path.dirname(os.path.abspath(what)), *paths], [what, *rest]
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    if sys.flags.isolated:
        ask(sys.argv[1], sys.argv[2:])
    else:
        serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
