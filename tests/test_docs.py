"""The generated documents agree with the code, and the example settings are settings."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparkserve.recipe_source import load_recipe, shipped_names
from sparkserve.settings import Settings, load, parse_env

ROOT = Path(__file__).parents[1]
GENERATE = [sys.executable, "docs/generate.py", "--check"]


def test_the_documents_agree_with_the_code() -> None:
    done = subprocess.run(GENERATE, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_document_that_differs_fails_with_a_diff(tmp_path: Path) -> None:
    copy = tmp_path / "docs" / "generate.py"
    copy.parent.mkdir()
    copy.write_bytes((ROOT / "docs/generate.py").read_bytes())
    (tmp_path / "docs" / "error_codes.py").write_bytes((ROOT / "docs/error_codes.py").read_bytes())
    for name in (
        "README.md", "env.example", "docs/configuration.md", "docs/recipes.md", "docs/commands.md",
        "docs/troubleshooting.md",
    ):  # fmt: skip
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    stale = tmp_path / "docs/commands.md"
    stale.write_text(stale.read_text().replace("## `sparkserve stop`", "## `sparkserve halt`"))
    done = subprocess.run(
        GENERATE, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "-## `sparkserve halt`\n+## `sparkserve stop`\n" in done.stdout
    assert "1 documents differ" in done.stderr


def test_the_example_settings_load_as_they_are(tmp_path: Path) -> None:
    env_file = tmp_path / ".env"
    env_file.write_bytes((ROOT / "env.example").read_bytes())
    sources = load(env_file, {}, {}).sources
    given = {name for name, source in sources.items() if source == str(env_file)}
    assert given == {"worker", "head_link", "worker_link"}


def test_every_line_of_the_example_settings_is_a_setting(tmp_path: Path) -> None:
    text = re.sub(r"^# (?=[A-Z_]+=)", "", (ROOT / "env.example").read_text(), flags=re.MULTILINE)
    values, errors = parse_env(text)
    assert not errors
    assert len(values) == len(Settings.model_fields)
    env_file = tmp_path / ".env"
    env_file.write_text(text)
    load(env_file, {}, {})


DISK = re.compile(
    r"about (\d+) GB of free disk for this recipe: (\d+) GB of weights, (\d+) GB [^,]+, (\d+) GB for the image"
)


def test_the_disk_that_the_readme_asks_for_is_the_recipes() -> None:
    told = DISK.search((ROOT / "README.md").read_text())
    assert told is not None
    recipe = load_recipe(Settings().recipe)
    weights = sum(one.expected_bytes for one in recipe.weights)
    counted = (recipe.disk_bytes, weights, recipe.memory.first_start_disk_bytes, recipe.image.expected_bytes)
    assert [int(figure) for figure in told.groups()] == [round(size / 1e9) for size in counted]


@pytest.mark.parametrize(
    "document", ["README.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    assert [target for target in links(path) if not (path.parent / target).exists()] == []


def links(path: Path) -> list[str]:
    return re.findall(r"\]\((?!https?://)([^)#]+)", path.read_text())


def test_the_readme_links_every_document() -> None:
    documents = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert documents - set(links(ROOT / "README.md")) == set()


def test_every_recipe_and_every_setup_without_one_is_told_as_unproven() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import generate
    finally:
        sys.path.pop(0)
    rows, _, missing = (ROOT / "docs/unproven.md").read_text().partition("## Setups of the sources that are no recipe")
    unproven = [name for name in shipped_names() if name != "tensorfold-1017" and not load_recipe(name).proven]
    assert [name for name in unproven if f"| `{name}`" not in rows] == []
    assert missing.count("\n- **") == len(generate.NOT_RECIPES)
    # What a source promises and no recipe sets.
    assert "--spill-gib" in rows


def test_every_error_code_is_read_from_the_code() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import error_codes
    finally:
        sys.path.pop(0)
    names = {code.name for code in error_codes.find_codes()}
    assert names >= {
        "tls_untrusted",
        "stalled",
        "connection_cut",
        "hub_gated",
        "hub_limit",
        "gpu_refused",
        "skip_unknown",
    }
    source = "def give(text):\n    raise SparkserveError({}, 'it failed')\n"
    assert [code.name for code in error_codes._codes_in(ast.parse(source.format("'known'")), {})] == ["known"]
    with pytest.raises(ValueError, match="give, line 2: which code is text"):
        list(error_codes._codes_in(ast.parse(source.format("text")), {}))
