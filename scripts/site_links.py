"""A hook of mkdocs: links of docs/ that lead outside of it lead to the repository. Without its address
(OCTET_REPOSITORY, such as https://github.com/NAME/octet) they are plain text.
"""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, config: Any, **_: object) -> str:
    """mkdocs calls this for each page."""
    where = rf"[\1]({config['repo_url'].rstrip('/')}/blob/main/\2)" if config["repo_url"] else r"\1"
    return OUTSIDE.sub(where, markdown)
