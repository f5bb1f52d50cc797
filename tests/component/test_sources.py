"""Every source is resolved against a real hub client, real git and a registry; what cannot be had is told at once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from sparkserve import sources
from sparkserve.errors import SparkserveError, flatten
from sparkserve.hub import list_files
from sparkserve.lock import find_disagreements
from sparkserve.recipe import Recipe
from sparkserve.recipe_source import load_recipe
from sparkserve.registry import parse_reference
from sparkserve.settings import Settings
from tests.component.fake_registry import FakeRegistry, running_registry
from tests.lab.git_area import git, publish_commit
from tests.lab.hub import Hub
from tests.lab.model_repo import ENGRAM_NAME, MODEL_NAME, TEMPLATE_NAME, make_all
from tests.lab.recipe import write_lab_recipe
from tests.lab.repo_store import ModelRepo, git_blob_id

TOKEN = "hf_token_of_the_test"
Change = Callable[[Recipe], Recipe]


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repos")
    make_all(root)
    publish_commit(root, "engine", {"bin/tensorfold": "#!/bin/sh\n"})
    return root


@pytest.fixture
def hub(repos: Path) -> Iterator[Hub]:
    with Hub(repos, hub_name="", content_name="") as running:
        yield running


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with running_registry() as running:
        yield running


@pytest.fixture
def recipe(repos: Path, registry: FakeRegistry, tmp_path: Path) -> Recipe:
    commits = {name: ModelRepo(repos, name).head for name in (MODEL_NAME, ENGRAM_NAME, TEMPLATE_NAME)}
    repository = str(repos / "_git/engine.git")
    write_lab_recipe(tmp_path / "lab", commits=commits, engine_repository=repository, base=registry.image())
    return load_recipe(str(tmp_path / "lab"))


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkserve.hub._FIRST_PAUSE", 0.01)


def settings_for(hub: Hub, **changes: Any) -> Settings:
    return Settings(hf_endpoint=hub.endpoint, **changes)


def quiet(_text: str) -> None:
    """Listen to nothing."""


def problems(recipe: Recipe, settings: Settings) -> list[SparkserveError]:
    with pytest.raises(SparkserveError) as caught:
        sources.resolve(recipe, settings, quiet)
    return flatten(caught.value)


def change_weights(recipe: Recipe, index: int, **changes: Any) -> Recipe:
    weights = list(recipe.weights)
    weights[index] = weights[index].model_copy(update=changes)
    return recipe.model_copy(update={"weights": tuple(weights)})


def change_image(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.model_copy(update={"image": recipe.image.model_copy(update=changes)})


def test_everything_is_resolved(hub: Hub, repos: Path, registry: FakeRegistry, recipe: Recipe) -> None:
    said: list[str] = []
    settings = settings_for(hub)
    lock = sources.resolve(recipe, settings, said.append)
    model, engram = lock.weights
    assert (model.commit, len(model.files)) == (ModelRepo(repos, MODEL_NAME).head, 43)
    stored = ModelRepo(repos, MODEL_NAME).entries(model.commit)
    for file in model.files:
        entry = stored[file.path]
        git_sha1 = None if entry.sha256 else entry.blob_id
        assert (file.size, file.sha256, file.git_sha1) == (entry.size, entry.sha256, git_sha1)
    assert [file.path[:11] for file in engram.files] == ["model-00047", "model-00048"]
    assert lock.chat_template is not None
    assert lock.chat_template.commit == ModelRepo(repos, TEMPLATE_NAME).head
    assert lock.image.base == f"127.0.0.1:{registry.port}/org/base@{registry.digest()}"
    assert lock.image.engine_commit == git("rev-parse", "main", directory=repos / "_git/engine.git")
    assert find_disagreements(lock, recipe, settings) == []
    assert [text.split()[0] for text in said] == ["weights", "weights", "chat", "engine", "base"]
    assert not [entry for entry in hub.log() if "/resolve/" in entry["path"]], "a lock fetches no file"


def test_an_image_may_have_no_engine_of_its_own(hub: Hub, recipe: Recipe) -> None:
    settings, said = settings_for(hub), list[str]()
    bare = change_image(recipe, engine_repository="", engine_revision="")
    lock = sources.resolve(bare, settings, said.append)
    assert (lock.image.engine_repository, lock.image.engine_commit) == ("", "")
    assert not [text for text in said if text.startswith("engine")]
    assert [row.kind for row in sources.describe(lock, bare, settings)][2:] == ["chat template", "base image"]
    assert find_disagreements(lock, bare, settings) == []
    assert find_disagreements(lock, recipe, settings)


def test_rows_of_a_lock(hub: Hub, recipe: Recipe) -> None:
    settings = settings_for(hub)
    short = change_weights(recipe, 0, revision=recipe.weights[0].revision[:8])
    lock = sources.resolve(short, settings, quiet)
    rows = sources.describe(lock, short, settings)
    assert [row.kind for row in rows] == ["weights", "weights", "chat template", "engine", "base image"]
    assert rows[0].asked == rows[0].resolved[:8]
    assert (rows[0].files, rows[0].size) == (43, lock.weights[0].total_bytes)
    assert rows[3].asked == "main"
    assert rows[4].resolved.startswith("sha256:")


def test_what_another_lock_would_change_is_listed_source_by_source_and_file_by_file(
    hub: Hub, repos: Path, recipe: Recipe
) -> None:
    settings = settings_for(hub)
    moving = change_weights(recipe, 0, revision="main")
    before = sources.resolve(moving, settings, quiet)
    assert sources.compare(before, sources.resolve(moving, settings, quiet), moving, settings) == []
    repo = ModelRepo(repos, MODEL_NAME)
    commit = repo.change("config.json", b"{}")
    hub.control(move_branch={"repo": MODEL_NAME, "branch": "main", "commit": commit})
    rows = sources.compare(before, sources.resolve(moving, settings, quiet), moving, settings)
    assert [row.source for row in rows] == [f"weights {MODEL_NAME}", "model/config.json"]
    assert (rows[0].before, rows[0].after) == (before.weights[0].commit, commit)
    assert rows[1].before != rows[1].after
    first = sources.compare(None, before, moving, settings)
    assert len(first) == 5 + 43 + 2
    assert {row.before for row in first} == {""}


def test_all_that_cannot_be_had_is_told_at_once(hub: Hub, registry: FakeRegistry, recipe: Recipe) -> None:
    registry.tags.clear()
    broken = change_image(recipe, engine_repository="/nowhere/engine.git")
    broken = change_weights(broken, 1, repository="deepseek-ai/absent")
    found = problems(broken, settings_for(hub))
    assert [error.code for error in found] == ["hub_missing", "source_unreachable", "registry_missing"]
    assert all(error.hint for error in found)
    assert "SPARKSERVE_ENGINE_REPOSITORY" in found[1].hint


# -- the hub ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("access", "token", "code"), [("token", None, "hub_login"), ("public", "hf_wrong", "hub_token")]
)
def test_a_hub_that_wants_another_token(repos: Path, recipe: Recipe, access: str, token: str | None, code: str) -> None:
    with Hub(repos, hub_name="", content_name="", token=TOKEN) as hub:
        hub.control(access=dict.fromkeys((MODEL_NAME, ENGRAM_NAME, TEMPLATE_NAME), access))
        secret = SecretStr(token) if token else None
        found = problems(recipe, settings_for(hub, hf_token=secret))
    assert {error.code for error in found} == {code}
    assert "HF_TOKEN" in found[0].hint
    assert not token or token not in str([vars(error) for error in found])


def test_the_right_token_opens_the_hub(repos: Path, recipe: Recipe) -> None:
    with Hub(repos, hub_name="", content_name="", token=TOKEN) as hub:
        lock = sources.resolve(recipe, settings_for(hub, hf_token=SecretStr(TOKEN)), quiet)
    assert TOKEN not in lock.model_dump_json()


def test_a_token_of_the_machine_is_not_sent(hub: Hub, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_machine")
    sources.resolve(recipe, settings_for(hub), quiet)
    assert not any(entry["had_token"] for entry in hub.log())


@pytest.mark.parametrize(
    ("status", "headers", "code"),
    [
        (403, {"X-Error-Code": "GatedRepo"}, "hub_gated"),
        (429, {}, "hub_limit"),
        (500, {}, "hub_failed"),
    ],
)
def test_refusals_of_the_hub(hub: Hub, recipe: Recipe, status: int, headers: dict[str, str], code: str) -> None:
    hub.fault("status", match={"path_regex": "EXL3"}, status=status, headers=headers)
    (error,) = problems(recipe, settings_for(hub))
    assert (error.code, bool(error.hint)) == (code, True)
    assert MODEL_NAME in error.message


def test_a_page_that_is_no_hub(hub: Hub, recipe: Recipe) -> None:
    hub.fault("html", match={"path_regex": "EXL3"}, body="<html>log in to this network</html>")
    (error,) = problems(recipe, settings_for(hub))
    assert (error.code, error.hint) == ("hub_failed", "look at HF_ENDPOINT")


def test_no_hub_at_all(recipe: Recipe) -> None:
    found = problems(recipe, Settings(hf_endpoint="http://127.0.0.1:9"))
    assert {error.code for error in found} == {"source_unreachable"}
    assert all("HF_ENDPOINT" in error.hint for error in found)


def test_a_missing_revision(hub: Hub, recipe: Recipe) -> None:
    (error,) = problems(change_weights(recipe, 0, revision="no-branch"), settings_for(hub))
    assert error.code == "hub_revision"
    assert "no-branch" in error.message


def test_a_branch_named_like_a_commit_is_no_commit(hub: Hub, repos: Path, recipe: Recipe) -> None:
    head = ModelRepo(repos, MODEL_NAME).head
    hub.control(move_branch={"repo": MODEL_NAME, "branch": "deadbeef", "commit": head})
    (error,) = problems(change_weights(recipe, 0, revision="deadbeef"), settings_for(hub))
    assert error.code == "hub_failed"
    assert head in error.message


def test_hidden_hashes_are_refused(hub: Hub, recipe: Recipe) -> None:
    hub.fault("mask_hash", match={"path_regex": "EXL3"})
    (error,) = problems(recipe, settings_for(hub))
    assert error.code == "hub_hash_hidden"
    assert "HF_TOKEN" in error.hint
    assert "model-00001-of-00039.safetensors" in error.details
    assert "config.json" not in error.details


def test_another_count_lists_what_was_found(hub: Hub, recipe: Recipe) -> None:
    (error,) = problems(change_weights(recipe, 0, exclude=()), settings_for(hub))
    assert error.code == "files_count"
    assert "46 of the wanted files; needed: 43" in error.message
    assert "README.md" in error.details.splitlines()


def test_a_cut_listing_is_noticed(hub: Hub, recipe: Recipe) -> None:
    hub.fault("cut_listing", match={"path_regex": "EXL3"})
    (error,) = problems(recipe, settings_for(hub))
    assert error.code == "files_count"


def test_a_wanted_file_that_is_not_there(hub: Hub, recipe: Recipe) -> None:
    wanted = ("model-00047-of-00048.safetensors", "model-00049-of-00048.safetensors")
    (error,) = problems(change_weights(recipe, 1, include=wanted), settings_for(hub))
    assert error.code == "files_missing"
    assert "model-00049" in error.message


def test_an_older_release_is_denied(hub: Hub, repos: Path, recipe: Recipe) -> None:
    engram = ModelRepo(repos, ENGRAM_NAME)
    old = engram.entries(engram.head)["model-00048-of-00048.safetensors"].sha256
    (error,) = problems(change_weights(recipe, 1, deny_sha256=(old,)), settings_for(hub))
    assert error.code == "files_denied"
    assert "model-00048" in error.message


def test_a_template_that_was_changed(hub: Hub, recipe: Recipe) -> None:
    assert recipe.chat_template is not None
    template = recipe.chat_template.model_copy(update={"git_sha1": git_blob_id(b"another")})
    (error,) = problems(recipe.model_copy(update={"chat_template": template}), settings_for(hub))
    assert error.code == "template_differs"


class _OldHub(BaseHTTPRequestHandler):
    """A hub that knows whole commits only, and the history of a repository."""

    commit = hashlib.sha1(b"the commit").hexdigest()
    other = hashlib.sha1(b"another").hexdigest()

    def do_GET(self) -> None:
        files = [{"rfilename": "config.json", "size": 2, "blobId": git_blob_id(b"{}")}]
        history = [{"id": name, "title": "t", "message": "", "authors": [], "date": "2026-09-01T00:00:00.000Z"}
                   for name in (self.other, self.commit)]  # fmt: skip
        pages: dict[str, Any] = {
            f"/api/models/o/n/revision/{self.commit}?blobs=true": {"id": "o/n", "sha": self.commit, "siblings": files},
            "/api/models/o/n/commits/main": history,
        }
        found = pages.get(self.path)
        body = json.dumps(found or {}).encode()
        self.send_response(200 if found else 404)
        if not found:
            self.send_header("X-Error-Code", "RevisionNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Keep quiet."""


@contextmanager
def old_hub() -> Iterator[Settings]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _OldHub)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield Settings(hf_endpoint=f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def test_a_hub_without_short_commits_is_asked_for_its_history() -> None:
    with old_hub() as settings:
        commit, files = list_files(settings, "o/n", _OldHub.commit[:8])
        assert (commit, list(files)) == (_OldHub.commit, ["config.json"])
        with pytest.raises(SparkserveError, match="no revision 00000000"):
            list_files(settings, "o/n", "00000000")


@pytest.mark.parametrize(("status", "headers", "times"), [(429, {"Retry-After": "1"}, 1), (503, {}, 2), (502, {}, 3)])
def test_a_listing_is_asked_for_three_times_while_the_hub_is_busy(
    hub: Hub, status: int, headers: dict[str, str], times: int
) -> None:
    hub.fault("status", match={"path_regex": "/api/models"}, status=status, headers=headers, times=times)
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        if times == 3:
            stack.enter_context(pytest.raises(SparkserveError, match=str(status)))
        list_files(settings_for(hub), MODEL_NAME, "main")
    assert time.monotonic() - begun >= sum(map(float, headers.values()))
    assert sum(entry["status"] == status for entry in hub.log()) == times


# -- git and images ---------------------------------------------------------------------------------------------------


def test_branches_tags_and_commits_of_an_engine(repos: Path, hub: Hub, recipe: Recipe) -> None:
    bare = repos / "_git/engine.git"
    commit = git("rev-parse", "main", directory=bare)
    git("tag", "--force", "--annotate", "--message", "release", "v1", "main", directory=bare)
    for revision in ("main", "v1", commit[:8], commit):
        lock = sources.resolve(change_image(recipe, engine_revision=revision), settings_for(hub), quiet)
        assert lock.image.engine_commit == commit
    (error,) = problems(recipe, settings_for(hub, engine_revision="absent"))
    assert (error.code, "main" in error.details.split()) == ("engine_revision", True)
    assert "SPARKSERVE_ENGINE_REVISION" in error.hint


def test_settings_name_another_engine(tmp_path: Path, hub: Hub, recipe: Recipe) -> None:
    commit = publish_commit(tmp_path, "fork", {"README": "text"})
    settings = settings_for(hub, engine_repository=str(tmp_path / "_git/fork.git"), engine_revision="main")
    lock = sources.resolve(recipe, settings, quiet)
    assert (lock.image.engine_repository, lock.image.engine_commit) == (settings.engine_repository, commit)


def test_a_whole_commit_still_needs_its_repository(hub: Hub, recipe: Recipe) -> None:
    pinned = change_image(recipe, engine_repository="/nowhere/engine.git", engine_revision="1" * 40)
    (error,) = problems(pinned, settings_for(hub))
    assert error.code == "source_unreachable"


@pytest.mark.parametrize("repository", ["ext::sh -c id", "--upload-pack=id"])
def test_an_address_that_would_run_a_command_is_refused(hub: Hub, recipe: Recipe, repository: str) -> None:
    (error,) = problems(change_image(recipe, engine_repository=repository), settings_for(hub))
    assert error.code == "source_unreachable"
    assert "uid=" not in error.details


def test_an_address_with_a_secret_is_refused_without_showing_it(hub: Hub, recipe: Recipe) -> None:
    settings = settings_for(hub, engine_repository="https://ghp_secret@example.invalid/engine.git")
    (error,) = problems(recipe, settings)
    assert error.code == "engine_secret"
    assert "ghp_secret" not in str(vars(error))


def test_a_pinned_digest_is_looked_up(hub: Hub, registry: FakeRegistry, recipe: Recipe) -> None:
    pinned = change_image(recipe, base=registry.image("moved"), base_digest=registry.digest())
    lock = sources.resolve(pinned, settings_for(hub), quiet)
    assert lock.image.base.endswith(registry.digest())
    (error,) = problems(change_image(recipe, base_digest="sha256:" + "0" * 64), settings_for(hub))
    assert error.code == "registry_missing"


@pytest.mark.parametrize("behaviour", [{"challenge": 'Basic realm="x"'}, {"status": 401}, {"status": 403}])
def test_a_digest_needs_no_look_at_a_registry_with_a_login(
    hub: Hub, registry: FakeRegistry, recipe: Recipe, behaviour: dict[str, Any]
) -> None:
    vars(registry).update(behaviour)
    pinned = change_image(recipe, base_digest="sha256:" + "5" * 64)
    assert sources.resolve(pinned, settings_for(hub), quiet).image.base.endswith("5" * 64)
    (error,) = problems(recipe, settings_for(hub))
    assert (error.code, "docker login" in error.hint) == ("registry_login", True)


def test_a_registry_without_a_digest_header_is_read(hub: Hub, registry: FakeRegistry, recipe: Recipe) -> None:
    registry.tells_digest = False
    lock = sources.resolve(recipe, settings_for(hub), quiet)
    assert lock.image.base.endswith(registry.digest())


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        ({"challenge": 'Basic realm="x"'}, "registry_login"),
        ({"status": 401}, "registry_login"),
        ({"status": 429}, "registry_limit"),
        ({"status": 503}, "registry_failed"),
        ({"told_digest": "md5:0"}, "registry_failed"),
    ],
)
def test_refusals_of_a_registry(
    hub: Hub, registry: FakeRegistry, recipe: Recipe, behaviour: dict[str, Any], code: str
) -> None:
    vars(registry).update(behaviour)
    (error,) = problems(recipe, settings_for(hub))
    assert (error.code, bool(error.hint)) == (code, True)


def test_a_registry_that_tells_another_digest_is_not_believed(hub: Hub, registry: FakeRegistry, recipe: Recipe) -> None:
    registry.told_digest = "sha256:" + "f" * 64
    (error,) = problems(change_image(recipe, base_digest=registry.digest()), settings_for(hub))
    assert error.code == "registry_failed"


def test_a_registry_that_is_not_there(hub: Hub, recipe: Recipe) -> None:
    (error,) = problems(change_image(recipe, base="127.0.0.1:9/org/base:1"), settings_for(hub))
    assert error.code == "source_unreachable"


def test_a_finished_image_needs_a_digest(hub: Hub, registry: FakeRegistry, recipe: Recipe) -> None:
    finished = change_image(recipe, dockerfile="", reference="", reference_help="the forum's image")
    (error,) = problems(finished, settings_for(hub))
    assert (error.code, error.exit_code) == ("image_unset", 2)
    assert "SPARKSERVE_IMAGE" in error.hint
    assert "the forum's image" in error.hint
    (error,) = problems(finished, settings_for(hub, image=registry.image()))
    assert error.code == "image_unpinned"
    wanted = error.hint.removeprefix("SPARKSERVE_IMAGE=")
    settings = settings_for(hub, image=wanted)
    lock = sources.resolve(finished, settings, quiet)
    assert lock.image.reference == wanted
    assert find_disagreements(lock, finished, settings) == []


@pytest.mark.parametrize(
    ("text", "address", "path", "wanted"),
    [
        ("python:3.12", "https://registry-1.docker.io", "library/python", "3.12"),
        ("vllm/vllm-openai", "https://registry-1.docker.io", "vllm/vllm-openai", "latest"),
        ("docker.io/library/python:3", "https://registry-1.docker.io", "library/python", "3"),
        ("nvcr.io/nvidia/pytorch:26.07-py3", "https://nvcr.io", "nvidia/pytorch", "26.07-py3"),
        ("localhost:5000/a/b:c", "http://localhost:5000", "a/b", "c"),
        ("127.0.0.1:5000/a", "http://127.0.0.1:5000", "a", "latest"),
        ("10.0.0.1:5000/a", "https://10.0.0.1:5000", "a", "latest"),
        ("ghcr.io/a/b:c@sha256:" + "0" * 64, "https://ghcr.io", "a/b", "c"),
    ],
)
def test_references_are_read_as_docker_reads_them(text: str, address: str, path: str, wanted: str) -> None:
    reference = parse_reference(text)
    assert (reference.address, reference.path, reference.tag) == (address, path, wanted)
    assert reference.digest == text.partition("@")[2]
