"""The base class of all sections of the configuration."""

import os
import re
import urllib.parse
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

RUNS = Path("runs")
LARGEST_BITS = 128  # of an integer
NOT_IN_A_FILE = re.compile("[\0\ud800-\udfff]")  # characters that neither a file name nor a page may have
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Seconds = Annotated[float, Field(gt=0.0, le=1e8)]  # timers refuse longer ones
one_or_many = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)


def _checked(url: str) -> str:
    """Refuse what is not an address, and an address that may contain a key, which config.yaml and `ps` would show."""
    parts = urllib.parse.urlsplit(url if url.isascii() else "")
    if not (parts.scheme in ("http", "https") and parts.netloc):
        raise ValueError("it is not the address of a server. Write one like http://127.0.0.1:8000")
    if "@" in parts.netloc or "?" in url:
        raise ValueError("it has a user name or a query in it. Put its key into VLLM_API_KEY, or into OCTET_JUDGE_KEY")
    return url


Address = Annotated[str, AfterValidator(_checked)]
BaseAddress = Annotated[Address, AfterValidator(lambda url: url.rstrip("/").removesuffix("/v1"))]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, serialize_by_alias=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _possible(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` for a number, which pydantic would take for 1, and what no program can store."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if is_section(kind):
            return value
        takes_numbers = bool({getattr(one, "__origin__", one) for one in (kind, *get_args(kind))} & {int, float})
        parts = [*value.values()] if isinstance(value, dict) else value
        for part in parts if isinstance(parts, list) else [parts]:
            if takes_numbers and isinstance(part, bool):
                raise ValueError("true and false are not numbers. Write a number")
            if isinstance(part, int) and part.bit_length() > LARGEST_BITS:
                raise ValueError("it is too large. Write a smaller number")
            if part == "" and Path in (kind, *get_args(kind)):
                raise ValueError("it is empty, which means the working folder. Name a folder, or write null")
            if isinstance(part, str) and NOT_IN_A_FILE.search(part):
                raise ValueError("it has a character that a file cannot store. Leave that out")
            if isinstance(part, str) and re.match(r"~[\w.-]+(/|$)", part) and os.path.expanduser(part) == part:
                raise ValueError("there is no such user. Write the path of a folder")
        return value


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)
