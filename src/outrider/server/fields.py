"""What every body and part of one has in common: no field that is not listed, null is left out."""

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, JsonValue, model_validator
from pydantic_core import CoreSchema


class Body(BaseModel):
    """No field but those that are listed; null is a field that is left out, unless it is needed.

    One that is not listed may be null, too: OpenAI's clients give answers back as they came.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, given: object) -> object:
        """Clients write null for what they do not set."""
        if not isinstance(given, dict):
            return given
        fields = cls.model_fields
        needed = {field.alias or name for name, field in fields.items() if field.is_required()}
        return {name: one for name, one in given.items() if one is not None or name in needed}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, JsonValue]:
        """The description says so, too."""
        schema = handler(core_schema)
        whole = handler.resolve_ref_schema(schema)
        needed = whole.get("required", [])
        for name, one in whole.get("properties", {}).items():
            if name not in needed and {"type": "null"} not in one.get("anyOf", []):
                about = {key: one.pop(key) for key in ("title", "default") if key in one}
                whole["properties"][name] = {"anyOf": [one, {"type": "null"}]} | about
        return schema
