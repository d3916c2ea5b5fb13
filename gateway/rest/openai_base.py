"""What all types of requests share: strictness, lists whose errors stay few, and texts that may be lists.

Tags of unions start with "~", so that error paths can leave them out.
"""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Tag


class Body(BaseModel):
    """Part of a request: nothing is converted, nothing unknown passes."""

    model_config = ConfigDict(strict=True, extra="forbid")


class FirstErrorOnly(FailFast):
    """A list of a million wrong elements makes one error. Hashable, which members of unions must be."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


Ids = Annotated[list[int], FirstErrorOnly()]
Texts = Annotated[list[str], FirstErrorOnly()]


def _one_or_list(value: object) -> str:
    return "~list" if isinstance(value, list) else "~one"


SomeList = TypeVar("SomeList")
# A text, or a list of this type.
TextOr = Annotated[Annotated[str, Tag("~one")] | Annotated[SomeList, Tag("~list")], Discriminator(_one_or_list)]
