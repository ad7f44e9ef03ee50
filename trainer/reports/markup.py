"""HTML and SVG in which every text is escaped, except markup made by `tag`."""

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template

from trainer.machine.safe_text import visible

HERE = Path(__file__).parent
RELOAD = '<meta http-equiv="refresh" content="5">\n'


class Html(str):
    """Markup. Any other text is escaped when it is put into an element."""


def tag(name: str, *inside: object, **attributes: object) -> Html:
    """Return an element. Underscores in names of attributes become dashes, and are dropped at the end."""
    named = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    head = "".join(f' {key}="{escape(visible(str(value)))}"' for key, value in named)
    return Html(f"<{name}{head}>{joined(*inside)}</{name}>")


def joined(*parts: object) -> Html:
    """Return the parts one after the other: markup as it is, and everything else escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(visible(str(part))) for part in parts))


def table(head: Sequence[object], rows: Sequence[Sequence[object]], kind: str = "") -> Html:
    """Return a table. Its first column names the rows."""
    cells = [[tag("th" if not place else "td", cell) for place, cell in enumerate(row)] for row in rows]
    top = tag("thead", tag("tr", *(tag("th", name) for name in head))) if any(head) else ""
    body = tag("tbody", *(tag("tr", *row) for row in cells))
    return tag("div", tag("table", top, body), class_=f"wide {kind}".strip())


def page(title: str, *sections: Html, reloads: bool = False) -> str:
    """Return a page that runs no script and loads nothing, which its content policy enforces. With `reloads` it reloads
    itself."""
    style = (HERE / "page.css").read_text(encoding="utf-8")
    digest = b64encode(sha256(style.encode()).digest()).decode()
    template = Template((HERE / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=joined(title), reload=RELOAD if reloads else "", digest=digest, style=style, body="\n".join(sections)
    )
