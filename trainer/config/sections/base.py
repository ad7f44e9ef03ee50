"""The base class of all sections of the configuration."""

import urllib.parse
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

RUNS = Path("runs")
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Seconds = Annotated[float, Field(gt=0.0, le=1e8)]  # timers refuse longer ones
one_or_many = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)


def base_address(url: str) -> str:
    """Return the address of a server without a path. Raise ValueError if it is none, unless it may contain a key,
    because the message would show it; another check refuses those."""
    if not (may_have_a_key(url) or is_address(url)):
        raise ValueError(f"{url} is not the address of a server. Write one like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def is_address(url: str) -> bool:
    parts = urllib.parse.urlsplit(url)
    return bool(url.isascii() and parts.scheme in ("http", "https") and parts.netloc)


def may_have_a_key(url: str) -> bool:
    return "@" in urllib.parse.urlsplit(url).netloc or "?" in url


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, serialize_by_alias=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` for a number, which pydantic would take for 1."""
        kind = cls.model_fields[str(info.field_name)].annotation
        kinds = {kind, *get_args(kind)}
        parts = value if isinstance(value, list) else [value]
        if kinds & {int, float} and any(isinstance(part, bool) for part in parts):
            raise ValueError("true and false are no numbers. Write a number")
        return value
