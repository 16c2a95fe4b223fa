"""What a check of an installation found, and what to do about it."""

import dataclasses
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the doctor's table.

    Attributes:
      name: What was looked at.
      status: `fail` where runs will not work, `warn` where some will not.
      detail: What was found.
      remedy: What to do; empty if it is ok.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""
