from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from sparkserve.api_client import describe_access, make_key
from sparkserve.errors import SparkserveError
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import Settings, read_secret

RECIPE = load_recipe("tensorfold-1017")
ADDRESSES = ("192.168.1.21", "10.9.0.1")


@pytest.mark.parametrize(
    ("host", "local", "remote", "tunnel"),
    [
        ("127.0.0.1", "127.0.0.1", ["127.0.0.1"], "ssh -N -L 8888:127.0.0.1:8888 me@192.168.1.21"),
        ("::1", "[::1]", ["[::1]"], "ssh -N -L 8888:[::1]:8888 me@192.168.1.21"),
        ("0.0.0.0", "127.0.0.1", list(ADDRESSES), ""),
        ("::", "[::1]", list(ADDRESSES), ""),
        ("192.168.1.21", "192.168.1.21", ["192.168.1.21"], ""),
    ],
)
def test_the_way_to_the_api(host: str, local: str, remote: list[str], tunnel: str) -> None:
    found = describe_access(Settings(api_host=host, api_open=True), RECIPE, "me", ADDRESSES)
    assert found.base_url == f"http://{local}:8888/v1"
    assert found.remote_urls == tuple(f"http://{one}:8888/v1" for one in remote)
    assert found.tunnel == tunnel
    assert (found.base_url in found.curl, found.base_url in found.python) == (True, True)


def test_the_key_is_named_and_never_told(tmp_path: Path) -> None:
    path = tmp_path / "it's a key"
    make_key(path)
    key = read_secret(path, "test").get_secret_value()
    found = describe_access(Settings(api_key_file=path), RECIPE, "me", ())
    assert key not in repr(found)
    assert shlex.quote(str(path)) in found.curl
    compile(found.python, "snippet", "exec")
    assert f'model="{RECIPE.parameters.model_name}"' in found.python
    words = shlex.split(found.curl.partition(" | ")[2].replace("\\\n", ""))
    assert words[:2] == ["curl", "http://127.0.0.1:8888/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == RECIPE.parameters.model_name


def test_a_key_that_cannot_be_read_is_told_before_it_is_used(tmp_path: Path) -> None:
    with pytest.raises(SparkserveError) as caught:
        describe_access(Settings(api_key_file=tmp_path / "none"), RECIPE, "me", ())
    assert (caught.value.code, caught.value.hint) == ("secret_missing", "sparkserve key new --set")


def test_a_key_is_private_new_and_never_replaced(tmp_path: Path) -> None:
    path, other = tmp_path / "key", tmp_path / "other"
    make_key(path)
    make_key(other)
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(text.strip()) >= 40
    assert text != other.read_text()
    with pytest.raises(SparkserveError) as caught:
        make_key(path)
    assert (caught.value.code, caught.value.exit_code) == ("key_exists", 2)
    assert path.read_text() == text
    with pytest.raises(SparkserveError) as caught:
        make_key(tmp_path / "none" / "key")
    assert caught.value.code == "key_unwritable"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["key", "other"]
