"""The lab's repositories have the real layout, and its template the public one's switches."""

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tests.lab.model_repo import (
    ENGRAM_NAME,
    MODEL_NAME,
    UNWANTED,
    make_all,
    make_bench_repo,
    make_model_repo,
    random_bytes,
)
from tests.lab.repo_store import ModelRepo, git_blob_id


def test_model_has_43_wanted_files(repos: Path) -> None:
    repo = ModelRepo(repos, MODEL_NAME)
    entries = repo.entries(repo.head)
    wanted = {path: entry for path, entry in entries.items() if path not in UNWANTED}
    assert len(entries) == 46
    assert len(wanted) == 43
    assert sum(path.endswith(".safetensors") for path in wanted) == 39
    assert {path for path, entry in wanted.items() if entry.sha256 is None} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert abs(sum(entry.size for entry in wanted.values()) - 40_000_000) < 800_000


@pytest.mark.parametrize("name", [MODEL_NAME, ENGRAM_NAME])
def test_shards_are_safetensors_and_agree_with_the_index(repos: Path, name: str) -> None:
    repo = ModelRepo(repos, name)
    index = json.loads(repo.source("model.safetensors.index.json").read_text())["weight_map"]
    for path in sorted(set(index.values())):
        content = repo.source(path).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        del header["__metadata__"]
        spans = [tensor["data_offsets"] for tensor in header.values()]
        assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])], path
        assert 8 + length + spans[-1][1] == len(content), path
        assert set(header) == {tensor for tensor, shard in index.items() if shard == path}


def test_engram_tables_are_in_the_last_two_shards(repos: Path) -> None:
    repo = ModelRepo(repos, ENGRAM_NAME)
    index = json.loads(repo.source("model.safetensors.index.json").read_text())["weight_map"]
    tables = {tensor: shard for tensor, shard in index.items() if "engram.embed" in tensor}
    assert tables == {
        "layers.1.engram.embed.weight": "model-00047-of-00048.safetensors",
        "layers.1.engram.embed.scale": "model-00047-of-00048.safetensors",
        "layers.14.engram.embed.weight": "model-00048-of-00048.safetensors",
        "layers.14.engram.embed.scale": "model-00048-of-00048.safetensors",
    }
    sizes = {path: entry.size for path, entry in repo.entries(repo.head).items() if path.endswith(".safetensors")}
    assert len(sizes) == 48
    assert sum(size > 9_000_000 for size in sizes.values()) == 2
    assert sum(size < 10_000 for size in sizes.values()) == 46


def test_every_hash_is_true(repos: Path) -> None:
    repo = ModelRepo(repos, MODEL_NAME)
    for entry in repo.entries(repo.head).values():
        content = repo.blob(entry).read_bytes()
        assert len(content) == entry.size
        if entry.sha256 is None:
            assert git_blob_id(content) == entry.blob_id
        else:
            assert hashlib.sha256(content).hexdigest() == entry.sha256


def test_commits_follow_from_content(repos: Path, tmp_path: Path) -> None:
    again = make_all(tmp_path)
    assert again == {name: ModelRepo(repos, name).head for name in again}
    repo = make_model_repo(tmp_path / "other", total_bytes=400_000)
    other = make_model_repo(tmp_path / "third", total_bytes=400_000, seed=2)
    assert len({repo.head, other.head, again[MODEL_NAME]}) == 3


def test_a_change_makes_a_commit_and_moves_only_the_named_branch(tmp_path: Path) -> None:
    repo = make_bench_repo(tmp_path, [1000, 2000])
    first = repo.head
    second = repo.change("file-00001.bin", b"new")
    assert repo.head == first
    assert repo.commits() == sorted([first, second])
    assert repo.source("file-00001.bin", second).read_bytes() == b"new"
    assert repo.change("file-00001.bin", b"new", branch="main") == second == repo.head
    assert repo.resolve(first[:7]) == first
    assert repo.resolve(first[:6]) is None
    assert repo.resolve("0" * 8) is None


def test_bench_blocks_differ() -> None:
    block = 8 << 20
    content = b"".join(random_bytes(2 * block + 5, "seed"))
    assert len(content) == 2 * block + 5
    assert content[:block] != content[block : 2 * block]
    assert content[8:block] == content[block + 8 : 2 * block]


def test_command_prints_commits(repos: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.lab.model_repo", str(tmp_path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(printed)[MODEL_NAME] == ModelRepo(repos, MODEL_NAME).head


@pytest.mark.parametrize("total", [3_000_000, 90_000_000])
def test_command_makes_as_much_as_it_is_told(tmp_path: Path, total: int) -> None:
    command = [sys.executable, "-m", "tests.lab.model_repo", str(tmp_path), f"--total-bytes={total}"]
    subprocess.run(command, check=True, capture_output=True)
    made = [ModelRepo(tmp_path, name) for name in (MODEL_NAME, ENGRAM_NAME)]
    size = sum(entry.size for repo in made for entry in repo.entries(repo.head).values())
    assert abs(size - total) < 800_000


def render(repos: Path, **context: Any) -> str:
    """Render the template as an engine would."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = refuse
    template = ModelRepo(repos, "lab/chat-template").source("chat_template.jinja").read_text()
    context.setdefault("messages", [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    text = environment.from_string(template).render(add_generation_prompt=True, **context)
    return text.replace("\N{FULLWIDTH VERTICAL LINE}", "|")


@pytest.mark.parametrize(
    ("switches", "end"),
    [
        ({}, "<think>"),
        ({"enable_thinking": True}, "<think>"),
        ({"enable_thinking": False}, "</think>"),
        ({"reasoning_effort": "max"}, "<think>"),
        ({"reasoning_effort": "none"}, "</think>"),
        ({"enable_thinking": False, "reasoning_effort": "high"}, "</think>"),
    ],
)
def test_template_opens_or_closes_thinking(repos: Path, switches: dict[str, Any], end: str) -> None:
    assert render(repos, **switches).endswith(f"S<|User|>U<|Assistant|>{end}")


def test_template_takes_a_prologue_that_switches_thinking_off(repos: Path) -> None:
    template = ModelRepo(repos, "lab/chat-template").source("chat_template.jinja").read_text()
    prologue = "{%- if enable_thinking is not defined -%}{%- set enable_thinking = false -%}{%- endif -%}"
    patched = jinja2.Environment().from_string(prologue + template)
    messages = [{"role": "user", "content": "U"}]
    assert patched.render(messages=messages, add_generation_prompt=True).endswith("</think>")
    assert patched.render(messages=messages, add_generation_prompt=True, enable_thinking=True).endswith("<think>")


def test_template_shows_tools_calls_and_results(repos: Path) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    text = render(
        repos,
        tools=[{"type": "function", "function": {"name": "add"}}],
        messages=[
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
        ],
    )
    assert '[tools]\n{"name": "add"}\n[/tools]' in text
    assert '</think>[call add {"a": 1}]<|end▁of▁sentence|><|Tool|>2<|Assistant|><think>' in text


@pytest.mark.parametrize(
    "wrong", [{"reasoning_effort": "huge"}, {"messages": [{"role": "nobody", "content": ""}]}], ids=["effort", "role"]
)
def test_template_refuses_what_it_does_not_know(repos: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(jinja2.TemplateError, match="unknown"):
        render(repos, **wrong)
