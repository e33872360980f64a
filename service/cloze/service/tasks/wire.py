"""The parts of request bodies, and how they are validated."""

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from cloze.model_store.docstrings import field_docstrings
from cloze.service.errors import InvalidRequest, Location


def _stop_at_first_error(schema: Any) -> None:
    """Set what a core schema says of lists, tuples and dictionaries, in all of its parts."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "dict"):
            schema["fail_fast"] = True
        if schema.get("type") == "tuple":
            schema["strict"] = False  # JSON has lists only
        for part in schema.values():
            _stop_at_first_error(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _stop_at_first_error(part)


class WireModel(BaseModel):
    """A part of a request body. Validation is strict and refuses unknown fields.

    The docstrings of fields are their descriptions in the API. The first use builds the schema.

    Validation stops at the first wrong element of each list, tuple and dictionary, and at the first
    unknown field: one error per element of a large body would exhaust the memory.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the model, with validation that stops at the first error."""
        schema: Any = handler(source)
        _stop_at_first_error(schema)
        inner = schema["schema"]
        if cls.model_config["extra"] == "forbid" and inner["type"] == "model-fields":
            validate = no_info_before_validator_function(cls._keep_one_unknown_field, inner)
            schema["schema"] = validate
        return schema  # type: ignore[no-any-return]

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the JSON schema of the model, with the docstrings of its fields."""
        schema, texts = handler(core_schema), field_docstrings(cls)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, field in zip(cls.model_fields, properties.values(), strict=True):
            field |= {"description": texts[name]} if name in texts else {}
        return schema

    @classmethod
    def _keep_one_unknown_field(cls, value: Any) -> Any:
        fields = cls.__pydantic_fields__  # `model_fields` takes ten times as long
        if not isinstance(value, dict) or len(value) <= len(fields):
            return value
        unknown = next(name for name in value if name not in fields)
        return {name: value[name] for name in (*fields, unknown) if name in value}


class NoParameters(WireModel):
    """The parameters of a task that has none."""


# Keywords for the schema only: a task checks these values, with errors of its own.
NotEmpty = Field(json_schema_extra={"minItems": 1})
NotEmptyText = Field(json_schema_extra={"minLength": 1})

Text = Annotated[str, NotEmptyText]
Texts = Annotated[list[Text], NotEmpty]
Count = Annotated[int, Field(json_schema_extra={"minimum": 1})]
CountOrZero = Annotated[int, Field(json_schema_extra={"minimum": 0})]


def _check_ids(ids: list[Any]) -> list[Any]:
    """Check that a list has integers only.

    A request may have a million token ids. pydantic needs 40 ms for them, in one call that keeps
    the interpreter from the event loop; other threads may run during this loop.
    """
    for index, item in enumerate(ids):
        if type(item) is not int:
            message = f"Input should be a list of integers; element {index} is another value"
            raise PydanticCustomError("ids", message)
    return ids


TokenIds = Annotated[
    list[Any],
    AfterValidator(_check_ids),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}),
]
"""The token ids of a text."""


def check_range(value: float, low: float, high: float, name: str) -> None:
    """Raise `InvalidRequest` if a parameter is below ``low`` or above ``high``."""
    if not low <= value <= high:
        raise InvalidRequest(f"must be between {low} and {high}, got {value}", Location((name,)))
