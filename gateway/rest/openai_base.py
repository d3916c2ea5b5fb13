"""What all types of requests share: strictness, and lists whose errors stay few."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, FailFast


class Body(BaseModel):
    """Part of a request: nothing is converted, nothing unknown passes."""

    model_config = ConfigDict(strict=True, extra="forbid")


class FirstErrorOnly(FailFast):
    """A list of a million wrong elements makes one error. Hashable, which members of unions must be."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


Ids = Annotated[list[int], FirstErrorOnly()]
Texts = Annotated[list[str], FirstErrorOnly()]
