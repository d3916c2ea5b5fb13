"""What an answer must match: OpenAI's `response_format` and vLLM's `structured_outputs`, names and types.

gateway/request/structured_output.py checks sizes. Must not know HTTP or how a form is enforced.
"""

from typing import Any, Literal

from pydantic import Field

from gateway.api.http.body import Body, Texts
from gateway.errors import bad_request
from gateway.request.types import AnswerForm

STRICT = "Refuses a schema of which a part cannot be enforced; otherwise that part is left to the model."


class JsonSchema(Body):
    """A JSON schema and its name."""

    name: str = Field(description="Not used.")
    description: str | None = Field(None, description="Not used.")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description=STRICT)


class ResponseFormat(Body):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def form(self) -> AnswerForm | None:
        """None: any text. Raises ApiError if type and schema do not match."""
        if self.type == "json_schema":
            if self.json_schema is None:
                path = "response_format.json_schema"
                raise bad_request(f"{path} is missing, which the type json_schema needs", path, "missing_field")
            return AnswerForm(
                "json_schema",
                self.json_schema.schema_,
                "response_format.json_schema.schema",
                bool(self.json_schema.strict),
            )
        if self.json_schema is not None:
            raise bad_request("response_format.json_schema needs the type json_schema", "response_format.json_schema")
        return None if self.type == "text" else AnswerForm("json_object", None, "response_format")


class StructuredOutputs(Body):
    """vLLM's way to ask for any form: exactly one of the fields."""

    regex: str | None = None
    grammar: str | None = Field(None, description="EBNF with the start rule root.")
    choice: Texts | None = None
    json_: Any = Field(None, alias="json", description="A JSON schema, as an object or as text.")

    def form(self) -> AnswerForm:
        """The form. Raises ApiError unless exactly one is given."""
        forms = [
            form
            for form in (
                AnswerForm("regex", self.regex, "structured_outputs.regex"),
                AnswerForm("grammar", self.grammar, "structured_outputs.grammar"),
                AnswerForm("choice", self.choice, "structured_outputs.choice"),
                AnswerForm("json_schema", self.json_, "structured_outputs.json"),
            )
            if form.value is not None
        ]
        if len(forms) != 1:
            raise bad_request(
                f"structured_outputs has {len(forms)} forms; give exactly one of regex, grammar, choice and json",
                "structured_outputs",
            )
        return forms[0]


def pick_form(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> AnswerForm | None:
    """The form that a request asks for, if any. Raises ApiError if it asks for two."""
    form = None if response_format is None else response_format.form()
    if structured_outputs is None:
        return form
    if form is not None:
        raise bad_request("structured_outputs and response_format are both given; drop one", "structured_outputs")
    return structured_outputs.form()
