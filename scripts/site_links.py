"""Hooks of mkdocs: the pages of gallery/ belong to the site over docs/, and links that lead to neither lead to the
repository. Without its address (OCTET_REPOSITORY, such as https://github.com/NAME/octet) those are plain text.
Code is folded where the page is narrow, but for tables and comments that stand in columns.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the gallery. mkdocs calls this with the files of docs/."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "gallery").glob("*.*")):
        files.append(File.generated(config, f"gallery/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, config: Any, page: Any = None, **_: object) -> str:
    """Change the links that lead out of the folder of a page."""
    in_gallery = bool(page) and page.file.src_uri.startswith("gallery/")

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        if re.fullmatch(r"gallery/[\w.]+", target) and not in_gallery:
            return f"[{text}]({target})"
        if target.startswith("docs/") and in_gallery:
            return f"[{text}](../{target.removeprefix('docs/')})"
        return f"[{text}]({config['repo_url'].rstrip('/')}/blob/main/{target})" if config["repo_url"] else text

    return OUTSIDE.sub(link, markdown)


def on_page_content(html: str, **_: object) -> str:
    """Mark the blocks of code that have columns."""

    def marked(block: re.Match[str]) -> str:
        columns = "─" in block[0] or len(re.findall(r"\S {3,}\S", block[0])) > 1
        return block[0].replace("<pre>", '<pre class="columns">', 1) if columns else block[0]

    return re.sub(r"<pre>.*?</pre>", marked, html, flags=re.DOTALL)
