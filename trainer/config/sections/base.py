"""What every section of the configuration has in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

RUNS = Path("runs")
Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, serialize_by_alias=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` for a number, which pydantic would take for 1."""
        kind = cls.model_fields[str(info.field_name)].annotation
        kinds = {kind, *get_args(kind)}
        parts = value if isinstance(value, list) else [value]
        if kinds & {int, float} and any(isinstance(part, bool) for part in parts):
            raise ValueError("true and false are no numbers. Write a number")
        return value
