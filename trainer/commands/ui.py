"""`octet ui`: serve a local page that starts and follows runs. Its routes and access checks are in `page/`."""

import socket
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path
from secrets import token_urlsafe

from trainer.commands.shared_options import writing
from trainer.config.settings import RUNS
from trainer.errors import ConfigError
from trainer.machine.installed_files import pip_install
from trainer.machine.safe_text import print

LOOPBACK = "127.0.0.1"


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet ui runs. The runs that it starts continue after the page or this command is closed."
    parser.add_argument("folder", nargs="?", type=Path, default=RUNS, metavar="FOLDER", help=f"default {RUNS}/")
    parser.add_argument("--port", type=int, default=0, help="for port forwarding; by default any free port")


def run(options: Namespace) -> None:
    """Print the address, and serve the page until Ctrl-C."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ConfigError("octet ui", f"not installed: {', '.join(missing)}", f"Run: {pip_install('ui')}")
    import uvicorn

    from trainer.commands.page.routes import application

    with writing(options.folder, "FOLDER"):
        options.folder.mkdir(parents=True, exist_ok=True)
    key, served = token_urlsafe(24), _socket(options.port)
    address = f"http://{LOOPBACK}:{served.getsockname()[1]}/{key}/"
    print(f"octet: {address}\nThe address contains a secret key. Ctrl-C ends the page, but no run.", flush=True)
    app = application(options.folder, key)
    # no access log, because its lines would contain the key
    settings = uvicorn.Config(app, ws="none", log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    uvicorn.Server(settings).run(sockets=[served])


def _socket(port: int) -> socket.socket:
    try:
        if not 0 <= port < 2**16:
            raise OSError(0, "ports are below 65536")
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # create_server repeats the address
        raise ConfigError(f"--port {port}", f"it cannot be used ({reason})", "Leave it out") from None
