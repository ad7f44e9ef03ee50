"""The routes of the page."""

import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from string import Template
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from trainer.commands.list import row
from trainer.commands.page import views
from trainer.commands.page.access import UPLOAD, Access
from trainer.commands.page.actions import ACTIONS, Choices
from trainer.commands.page.runs import UPLOADS, Runs
from trainer.config.choose_preset import choose_preset
from trainer.config.sections.task import BUILT_IN, PROMPT_STYLES
from trainer.config.train_options import PRESETS, RECIPES, names_in
from trainer.errors import ConfigError, OctetError
from trainer.export import FORMATS
from trainer.machine import disk, hardware
from trainer.plan.cards import CARDS
from trainer.plan.search import CHOICES
from trainer.problem.sources import READERS
from trainer.reports import markup
from trainer.reports.markup import Html, joined, tag

HERE = Path(__file__).parent
MADE = ("share.png", "share.svg", "report.html")
FILE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; sandbox"


def application(folder: Path, key: str) -> Access:
    pages = Pages(folder)

    @asynccontextmanager
    async def ending(app: Starlette) -> AsyncIterator[None]:
        yield
        for name in list(pages.runs.chats):
            pages.runs.hang_up(name)

    routes = [
        Route("/", pages.page),
        Route("/ui.js", lambda request: FileResponse(HERE / "ui.js")),
        Route("/ui.css", lambda request: FileResponse(HERE / "ui.css")),
        Route("/page.css", lambda request: FileResponse(markup.HERE / "page.css")),
        Route("/live", pages.live),
        Route("/do/{action}", pages.act, methods=["POST"]),
        Route("/commands", pages.commands, methods=["POST"]),
        Route(UPLOAD, pages.upload, methods=["PUT"]),
        Route("/made/{name}", pages.made),
    ]
    return Access(Starlette(routes=routes, lifespan=ending), key)


class Pages:
    def __init__(self, folder: Path) -> None:
        self.runs = Runs(folder)
        self.limiter = CapacityLimiter(2)  # commands at once, so that many clicks leave processors for a run
        self.row = lru_cache(1000)(lambda name, seen: row(folder / name, folder))

    async def page(self, request: Request) -> Response:
        """Return the form. Its script fills in the choices in the address, or else these defaults."""
        machine, named = hardware.detect(), self.runs.named()
        preset, _ = choose_preset(machine)
        name = next(name for number in count(1) if (name := f"run-{number}") not in named)
        first = {"--preset": preset, "task.name": "nano" if preset == "nano" else "gsm8k", "name": name}
        lists = {"tasks": BUILT_IN, "models": ("nano", *CHOICES), "cards": CARDS, "styles": PROMPT_STYLES}
        lists |= {"presets": names_in(PRESETS), "recipes": names_in(RECIPES)}
        lists |= {"formats": ["q8_0", *(one for one in FORMATS if one != "q8_0")]}
        options = {key: joined(*(tag("option", name, value=name) for name in names)) for key, names in lists.items()}
        texts = {"first": json.dumps(first), "machine": str(machine), "endings": ", ".join(READERS)}
        values = options | {key: joined(text) for key, text in texts.items()}
        return HTMLResponse(Template((HERE / "ui.html").read_text(encoding="utf-8")).substitute(values))

    def live(self, request: Request) -> Response:
        """Return the state of the runs, or status 304 if nothing has changed. Starlette runs this in a thread."""
        began, selected = time.thread_time(), request.query_params.getlist("run")
        unborn = self.runs.without_folder()
        names = [*unborn, *self.runs.named()]
        seen = [self.runs.seen(name) for name in names]
        mark = sha256(repr((selected, seen)).encode()).hexdigest()
        parts = list[Html]()
        if mark != request.headers.get("if-none-match"):
            rows = [[name, views.NO_FOLDER, "", "", "", ""] for name in unborn]
            rows += [cells for name, *of_run in seen if (cells := self.row(name, tuple(of_run)))]
            parts += views.of_runs(self.runs, rows, selected)
        headers = {"ETag": mark, "X-Seconds": f"{time.thread_time() - began:.3f}"}
        return _answer(*parts, headers=headers) if parts else Response(status_code=304, headers=headers)

    async def commands(self, request: Request) -> Response:
        """Return the command of each requested action, or the reason why there is none."""
        given = await _object(request)
        try:
            rows = given.get("rows", ())
            asked = [(ACTIONS[name], Choices(self.runs, {**given, **own})) for name, own in rows]
        except (TypeError, ValueError, LookupError):
            raise HTTPException(400, "Write names of actions with their choices.") from None
        return JSONResponse(await to_thread.run_sync(lambda: [_command(*one) for one in asked]))

    async def act(self, request: Request) -> Response:
        name, chosen = request.path_params["action"], Choices(self.runs, await _object(request))
        if name not in ACTIONS:
            raise HTTPException(404, "There is no such action.")
        limiter = None if name == "stop" else self.limiter  # so that it never waits
        return _answer(await to_thread.run_sync(_act, name, chosen, limiter=limiter))

    async def upload(self, request: Request) -> Response:
        """Store a table under its name. Files of other kinds are refused."""
        name = re.sub(r"[^\w.-]+", "_", Path(request.query_params.get("name", "")).name).lstrip("._-")[-100:]
        if Path(name).suffix.lower() not in READERS:
            remedy = f"A table ends in {', '.join(READERS)}"
            error = ConfigError(name or "a file", "its name does not say what it is", remedy)
            return _answer(views.target("sent", views.error(str(error))), status_code=415)
        place = self.runs.folder / UPLOADS / name
        try:
            place.parent.mkdir(exist_ok=True)
            if place.parent.is_symlink():
                raise OSError(f"{place.parent} is a link")
            await to_thread.run_sync(disk.replace, place, await request.body())
        except (OSError, HTTPException) as failed:
            said = views.error(getattr(failed, "detail", str(failed)))
            return _answer(views.target("sent", said), status_code=getattr(failed, "status_code", 507))
        words = json.dumps(["task.name=records", f"task.path={place}", "task.question=", "task.answer="])
        sent = tag("p", f"{place}, {disk.amount(place.stat().st_size)}", data_take=words)
        return _answer(views.target("sent", sent))

    async def made(self, request: Request) -> Response:
        """Return a picture or the report of a run, whose scripts are blocked."""
        name = request.path_params["name"]
        with suppress(OctetError):
            file = self.runs.place(request.query_params.get("run")) / name
            if name in MADE and file.is_file() and not file.is_symlink():
                return FileResponse(file, headers={"Content-Security-Policy": FILE_POLICY})
        return PlainTextResponse("There is no such file.\n", 404)


async def _object(request: Request) -> dict[str, Any]:
    try:
        return dict(await request.json())
    except (ValueError, TypeError):
        raise HTTPException(400, "Write an object, as JSON.") from None


def _command(action: Callable[[Choices], Iterator[str]], chosen: Choices) -> str:
    try:
        return next(action(chosen))
    except OctetError as error:
        return str(error)


def _act(name: str, chosen: Choices) -> Html:
    """Return the result of an action in the element that the browser has named."""
    parts = list[str]()
    try:
        action = ACTIONS[name](chosen)
        next(action)  # its command, which the page shows already
        parts.extend(action)
    except (OctetError, OSError, ValueError) as error:  # such as a zero byte in a command
        parts.append(views.error(str(error)))
    return views.target(chosen.of("into"), *parts)


def _answer(*parts: Html, **options: Any) -> Response:
    return HTMLResponse("\n".join(parts), **options)
