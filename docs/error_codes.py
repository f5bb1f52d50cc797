"""Find every error code in the source, with what its error says and what it advises, for `docs/troubleshooting.md`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import sparkserve
from sparkserve.check_catalog import CATALOG
from sparkserve.errors import DOCKER_PROBLEMS

# Who makes an error, and the places of its code, its message and its hint among the arguments.
MAKERS = {
    "SparkserveError": (0, 1, 2),
    "EndpointError": (0, 1, 2),
    "usage_error": (0, 1, 2),
    "_refusal": (0, 1, 2),
    "failure": (0, 1, 9),  # of a start: it finds its hint itself
    "disk_error": (3, 1, 9),
}
# What stands for a code that is told where it comes from: the catalogue of checks, an error that is handed on.
PASSED_ON = ("f'check_{check.id}'", "prober.error.code", "exchange")
UNKNOWN = "…"
Scope = Mapping[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Code:
    """One way in which an error with this code is told; what is only known when it happens is `…`."""

    name: str
    message: str
    hint: str


def find_codes() -> list[Code]:
    """Give all codes of the package, each way of telling once, by name."""
    found: dict[tuple[str, str], Code] = {}
    paths = sorted(Path(sparkserve.__file__).parent.glob("*.py"))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    hints = {name: hint for tree in trees for name, hint in _hints_of_makers(tree)}
    for code in (code for tree in trees for code in _codes_in(tree, hints)):
        found.setdefault((code.name, code.message), code)
    for observed, hint in DOCKER_PROBLEMS.values():
        found["docker_unreachable", observed] = Code("docker_unreachable", observed, hint)
    # A way that says nothing of itself is left out where the same code is told in another way too.
    told = {code.name for code in found.values() if code.message != UNKNOWN}
    rows = [code for code in found.values() if code.message != UNKNOWN or code.name not in told]
    rows += [Code(f"check_{name}", entry.why, entry.fix) for name, entry in CATALOG.items()]
    return sorted(rows, key=lambda code: (code.name, code.message))


def _functions(tree: ast.Module) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def _hints_of_makers(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Give what a function that makes errors says where its caller says nothing: the first hint that it sets."""
    for function in _functions(tree):
        hints = [node.value for node in _assignments(function) if ast.unparse(node.targets[0]) == "hint"]
        if function.name in MAKERS and hints:
            yield function.name, _text(hints[0], _assigned(tree.body, {}))


def _codes_in(tree: ast.Module, hints: Scope) -> Iterator[Code]:
    scope = {**_assigned(tree.body, {}), **hints}
    for function in _functions(tree):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in MAKERS:
                yield from _codes(node, function, scope, tree)


def _codes(node: ast.Call, function: Function, constants: Scope, tree: ast.Module) -> Iterator[Code]:
    """Read one call that makes an error: one code, or each that a table or a branch before it names."""
    maker = ast.unparse(node.func).rpartition(".")[2]
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    asked = [
        node.args[place] if place < len(node.args) else named.get(name)
        for name, place in zip(("code", "message", "hint"), MAKERS[maker], strict=True)
    ]
    first = asked[0]
    if first is None or ast.unparse(first) in PASSED_ON:
        return
    before = [part for part in _assignments(function) if part.lineno < node.lineno]
    ways: list[dict[str, str]] = [{}]
    if isinstance(first, ast.Name):
        ways = list(_ways(first.id, function, tree))
        before = [part for part in before if first.id not in _names(part.targets[0])]
    scope = _assigned(before, constants)
    found = [Code(*(_text(part, {**scope, **way}) for part in asked)) for way in ways]
    if any(UNKNOWN in code.name for code in found) or not (found or function.name in MAKERS):
        raise ValueError(f"{function.name}, line {node.lineno}: which code is {ast.unparse(first)}?")
    for code in found:
        yield Code(code.name, code.message, code.hint or scope.get(maker, ""))


def _ways(name: str, function: Function, tree: ast.Module) -> Iterator[dict[str, str]]:
    """Find all that a name can be: in a row of a table, in what a function gives, in a branch, or by default."""
    arguments = function.args.args + function.args.kwonlyargs
    defaults = [*function.args.defaults, *function.args.kw_defaults]
    for argument, default in zip(reversed(arguments), reversed(defaults), strict=False):
        if argument.arg == name and default is not None:
            yield {name: _text(default, {})}
    for node in ast.walk(function):
        match node:
            case ast.For(target=names, iter=ast.Name(id=source)):
                parts = [part for part in tree.body if _is_named(part, source)]
            case ast.Assign(targets=[names], value=ast.Call(func=ast.Name(id=source))):
                parts = [part for part in tree.body if _is_named(part, source)]
            case ast.Assign(targets=[names]):
                parts = [node]
            case _:
                continue
        bound = _names(names)
        for part in parts if name in bound else ():
            for row in ast.walk(part):
                if isinstance(row, ast.Tuple) and isinstance(row.ctx, ast.Load) and len(row.elts) == len(bound):
                    scope = _assigned((one for one in _assignments(part) if one.lineno < row.lineno), {})
                    found = {key: _text(one, scope) for key, one in zip(bound, row.elts, strict=True)}
                    if UNKNOWN not in found[name]:
                        yield found


def _names(target: ast.expr) -> list[str]:
    """List what a tuple on the left is made of."""
    parts = target.elts if isinstance(target, ast.Tuple) else []
    return [part.id if isinstance(part, ast.Name) else "" for part in parts]


def _is_named(part: ast.stmt, name: str) -> bool:
    match part:
        case ast.FunctionDef(name=found) | ast.Assign(targets=[ast.Name(id=found)]):
            return found == name
    return False


def _assignments(function: ast.AST) -> list[ast.Assign]:
    found = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    return sorted(found, key=lambda node: node.lineno)


def _assigned(statements: Iterable[ast.stmt], scope: Scope) -> dict[str, str]:
    """Give the texts of the variables that these statements assign, in this order, beside those already known."""
    found = dict(scope)
    for node in statements:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                pairs = list(zip(names, values, strict=True))
            case ast.Assign(targets=names, value=value):
                pairs = [(name, value) for name in names]
            case _:
                pairs = []
        found |= {name.id: _text(value, found) for name, value in pairs if isinstance(name, ast.Name)}
    return found


def _text(node: ast.expr | None, scope: Scope) -> str:
    """Read what can be read of an expression's text."""
    match node:
        case ast.Constant(value=str(text)):
            found = text
        case ast.JoinedStr(values=parts):
            found = "".join(_text(part, scope) for part in parts)
        case ast.FormattedValue(value=ast.Name() as name):
            found = _text(name, scope)
        case ast.Name(id=name):
            found = scope.get(name, UNKNOWN)
        case ast.IfExp(body=first):
            found = _text(first, scope)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            found = _text(left, scope) + _text(right, scope)
        case _:
            found = UNKNOWN if node else ""
    return found
