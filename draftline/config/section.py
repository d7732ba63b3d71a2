"""What every section of a configuration is: strict, frozen, and careful with numbers and paths."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

# What counts fit into wherever they go: 32-bit indices of kernels, 64-bit seeds, eight digits of a
# checkpoint's name. Beyond these a number is a slip, and would be a traceback from deep inside.
MOST = 2**31 - 1
MOST_TOKENS = 2**24
MOST_STEPS = 10**8 - 1


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads yes, on and off as flags, and pydantic reads a flag as 1 or 0.
        if (
            isinstance(value, bool)
            and cls.model_fields[info.field_name or ""].annotation is not bool
        ):
            raise PydanticCustomError("flag", "a flag where none may be")
        return value


def expanded(value: Any) -> Any:
    """A path, or every path of a list or mapping, with `~` expanded; blanks alone are refused."""
    if isinstance(value, str):
        if not value.strip():
            raise PydanticCustomError("blank", "a path of no characters")
        return os.path.expanduser(value)
    if isinstance(value, list):
        return [expanded(item) for item in value]
    return {k: expanded(v) for k, v in value.items()} if isinstance(value, dict) else value
