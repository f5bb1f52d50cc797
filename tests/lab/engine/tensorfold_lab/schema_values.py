"""A value that is valid for a JSON schema, with what the prompt offers put where it fits."""

import re
from collections.abc import Callable
from typing import Any

COMMON_TEXT = (
    "A An And Answer Are At By Call Can Could Do Extract Fill For Get Give How I If In Is It Json JSON List Name Of On "
    "Or Output Please Reply Respond Return Set Tell The This To Tool Use User What When Where Which Who Why With You"
)
COMMON_WORDS = frozenset(COMMON_TEXT.split())
RESULT_NAMES = re.compile(r"answer|result|product|sum|total|value", re.IGNORECASE)
FORMATS = {
    "date": "2025-01-31",
    "date-time": "2025-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "email": "someone@example.com",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


class SchemaError(ValueError):
    """The schema asks for something this stand-in cannot give."""


class SchemaFiller:
    """Fills schemas from one prompt; each number and name of the prompt is used once, in order."""

    def __init__(self, prompt: str, known: int | None = None) -> None:
        self._prompt = prompt
        self._known = known
        self._numbers = [found.replace(",", "") for found in re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?", prompt)]
        words = re.findall(r"\b[A-Z][\w-]*\b", prompt)
        self._words = [word for word in words if word not in COMMON_WORDS]

    def fill(self, schema: dict[str, Any]) -> Any:
        """A value for the whole schema."""
        self._root = schema
        return self._value(schema, "")

    def _value(self, schema: dict[str, Any], name: str) -> Any:
        schema = self._resolve(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._choice(schema["enum"])
        kind = schema.get("type", "object" if "properties" in schema else "string")
        if isinstance(kind, list):
            kind = next((one for one in kind if one != "null"), "null")
        makers: dict[str, Callable[[dict[str, Any], str], Any]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._number,
            "number": self._number,
            "boolean": lambda _schema, _name: True,
            "null": lambda _schema, _name: None,
        }
        if kind not in makers:
            raise SchemaError(f"unknown type {kind!r}")
        return makers[kind](schema, name)

    def _resolve(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in schema:
            target: Any = self._root
            for part in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
                if not isinstance(target, dict) or part not in target:
                    raise SchemaError(f"no such reference {schema['$ref']}")
                target = target[part]
            return self._resolve(target)
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return self._resolve(schema[several][0])
        if "allOf" in schema:
            merged: dict[str, Any] = {}
            for part in schema["allOf"]:
                merged |= self._resolve(part)
            return merged
        return schema

    def _object(self, schema: dict[str, Any], _name: str) -> dict[str, Any]:
        properties = schema.get("properties", {})
        names = schema.get("required", list(properties))
        return {name: self._value(properties.get(name, {}), name) for name in names}

    def _array(self, schema: dict[str, Any], name: str) -> list[Any]:
        return [self._value(schema.get("items", {}), name) for _ in range(max(schema.get("minItems", 1), 1))]

    def _string(self, schema: dict[str, Any], name: str) -> str:
        if schema.get("format") in FORMATS:
            return FORMATS[schema["format"]]
        value = self._named(name, r"([A-Z][\w-]*|\"[^\"]+\")").strip('"') or (
            self._words.pop(0) if self._words else "x"
        )
        return value.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength")]

    def _number(self, schema: dict[str, Any], name: str) -> int | float:
        text = self._named(name, r"(-?\d[\d,]*(?:\.\d+)?)").replace(",", "")
        if self._known is not None and RESULT_NAMES.search(name):
            value = float(self._known)
        elif text:
            value = float(text)
        else:
            value = float(self._numbers.pop(0)) if self._numbers else 1.0
        low = schema.get("minimum", schema.get("exclusiveMinimum", value - 1) + 1)
        high = schema.get("maximum", schema.get("exclusiveMaximum", value + 1) - 1)
        value = min(max(value, low), high)
        step = schema.get("multipleOf")
        value = value // step * step if step else value
        return int(value) if schema["type"] == "integer" or value == int(value) else value

    def _choice(self, values: list[Any]) -> Any:
        said = [value for value in values if re.search(rf"\b{re.escape(str(value))}\b", self._prompt, re.IGNORECASE)]
        return (said or values)[0]

    def _named(self, name: str, value: str) -> str:
        """What the prompt says of this property: "age is 41", "age: 41", "41 years"."""
        if not name:
            return ""
        label = re.escape(name).replace("_", "[ _-]")
        after = re.search(rf"(?i:\b{label}\b)[\"']?(?: is| of|:| =|)\s*{value}", self._prompt)
        return after[1] if after else ""
