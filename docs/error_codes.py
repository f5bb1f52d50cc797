"""Find every error code in the source, with what its error says and what it advises, for `docs/troubleshooting.md`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import sparkserve
from sparkserve.check_catalog import CATALOG

# Who makes an error, and the places of its code, its message and its hint among the arguments.
MAKERS = {
    "SparkserveError": (0, 1, 2),
    "EndpointError": (0, 1, 2),
    "usage_error": (0, 1, 2),
    "_refusal": (0, 1, 2),
    "failure": (0, 1, 9),  # of a start: its advice is in what the logs say
}
UNKNOWN = "…"
Scope = Mapping[str, str]


@dataclass(frozen=True)
class Code:
    """One way in which an error with this code is told; what is only known when it happens is `…`."""

    name: str
    message: str
    hint: str


def find_codes() -> list[Code]:
    """Give all codes of the package, each way of telling once, by name."""
    found: dict[tuple[str, str], Code] = {}
    for path in sorted(Path(sparkserve.__file__).parent.glob("*.py")):
        for code in _codes_in(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault((code.name, code.message), code)
    # A way that says nothing of itself is left out where the same code is told in another way too.
    told = {code.name for code in found.values() if code.message != UNKNOWN}
    rows = [code for code in found.values() if code.message != UNKNOWN or code.name not in told]
    rows += [Code(f"check_{name}", entry.why, entry.fix) for name, entry in CATALOG.items()]
    return sorted(rows, key=lambda code: (code.name, code.message))


def _codes_in(tree: ast.Module) -> Iterator[Code]:
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from filter(None, (_code(node, function) for node in ast.walk(function)))


def _code(node: ast.AST, function: ast.AST) -> Code | None:
    if not isinstance(node, ast.Call):
        return None
    maker = ast.unparse(node.func).rpartition(".")[2]
    if maker not in MAKERS:
        return None
    scope = _assigned_before(node.lineno, function)
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    code, message, hint = (
        _text(node.args[place] if place < len(node.args) else named.get(name), scope)
        for name, place in zip(("code", "message", "hint"), MAKERS[maker], strict=True)
    )
    return None if UNKNOWN in code or not code else Code(code, message, hint)


def _assigned_before(line: int, function: ast.AST) -> Scope:
    """Give the texts of a function's variables as they are at a line; the last assignment above it counts."""
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and node.lineno < line]
    scope: dict[str, str] = {}
    for node in sorted(assigned, key=lambda node: node.lineno):
        for target in node.targets:
            if isinstance(target, ast.Name):
                scope[target.id] = _text(node.value, scope)
    return scope


def _text(node: ast.expr | None, scope: Scope) -> str:
    """Read what can be read of an expression's text."""
    match node:
        case ast.Constant(value=str(text)):
            found = text
        case ast.JoinedStr(values=parts):
            found = "".join(str(part.value) if isinstance(part, ast.Constant) else UNKNOWN for part in parts)
        case ast.Name(id=name):
            found = scope.get(name, UNKNOWN)
        case ast.IfExp(body=first):
            found = _text(first, scope)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            found = _text(left, scope) + _text(right, scope)
        case _:
            found = UNKNOWN if node else ""
    return found
