"""The HTTP interface as a page without scripts: its paths, and the fields of their requests."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
"""Headers of the page."""

STYLE = (
    ":root{color-scheme:light dark}body{font:1rem/1.5 system-ui;max-width:60rem;margin:2rem auto;"
    "padding:0 1rem}table{border-collapse:collapse}"
    "td,th{text-align:left;padding:.2rem 1rem .2rem 0}"
)

BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
"""Bounds of JSON schemas, and how they are written."""


@dataclass(frozen=True)
class Operation:
    """What a client may send to a path."""

    method: str
    path: str
    description: str
    fields: Sequence[tuple[str, str, str]]
    """Name, type, and `required` or the default, of each field of the body; of a body with two
    forms the fields of both."""


def list_operations(schema: Mapping[str, Any]) -> list[Operation]:
    """Returns the operations of an OpenAPI schema, in its order."""
    schemas = schema.get("components", {}).get("schemas", {})
    return [
        Operation(method.upper(), path, each.get("description", ""), _list_fields(each, schemas))
        for path, operations in schema["paths"].items()
        for method, each in operations.items()
    ]


def render_page(schema: Mapping[str, Any]) -> str:
    """Returns an OpenAPI schema as an HTML page."""
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>as2ray: HTTP</title>',
        f"<style>{STYLE}</style><h1>HTTP</h1>",
        '<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    for each in list_operations(schema):
        parts.append(f"<h2>{each.method} {escape(each.path)}</h2><p>{escape(each.description)}</p>")
        if each.fields:
            cells = (f"<td>{'</td><td>'.join(map(escape, field))}</td>" for field in each.fields)
            rows = "".join(f"<tr>{row}</tr>" for row in cells)
            parts.append(f"<table><tr><th>field</th><th>type</th><th></th></tr>{rows}</table>")
    return "\n".join(parts) + "\n</html>\n"


def _list_fields(
    operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    content = operation.get("requestBody", {}).get("content", {})
    body = content.get("application/json", {}).get("schema", {})
    fields: dict[str, tuple[str, str, str]] = {}
    objects = list(_list_objects(body, schemas))
    required = set.intersection(*(set(each.get("required", ())) for each in objects or [{}]))
    for schema in objects:
        for name, each in schema.get("properties", {}).items():
            default = f"default {each['default']}" if "default" in each else ""
            note = "required" if name in required else default
            fields.setdefault(name, (name, _describe_type(each, schemas), note))
    return list(fields.values())


def _list_objects(
    schema: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yields the object that a body is, or the objects that it may be."""
    if "$ref" in schema:
        yield schemas[schema["$ref"].rpartition("/")[2]]
    for each in schema.get("anyOf", ()):
        yield from _list_objects(each, schemas)


def _describe_type(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _describe_type(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_describe_type(each, schemas) for each in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_describe_type(schema.get('items', {}), schemas)}"
    bounds = " and ".join(f"{sign} {schema[b]:,.10g}" for b, sign in BOUNDS.items() if b in schema)
    return f"{schema.get('type', 'any')} {bounds}".strip()
