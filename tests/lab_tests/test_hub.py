"""The hub speaks to the real huggingface_hub client, and its plain areas to git and curl."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.lab.git_area import git, publish_commit, publish_file
from tests.lab.hub import Hub
from tests.lab.model_repo import ENGRAM_NAME, MODEL_NAME, make_bench_repo
from tests.lab.repo_store import ModelRepo
from tests.lab_tests.hub_client import SHARD, api, download, fetch, link_to, running_hub

TOKEN = "hf_labtoken"


def test_model_info_gives_sizes_and_hashes(hub: Hub, repos: Path) -> None:
    repo = ModelRepo(repos, MODEL_NAME)
    info = api(hub).model_info(MODEL_NAME, revision=repo.head[:8], files_metadata=True)
    assert info.sha == repo.head
    seen = {file.rfilename: (file.size, file.blob_id, file.lfs and file.lfs.sha256) for file in info.siblings or []}
    assert seen == {path: (item.size, item.blob_id, item.sha256) for path, item in repo.entries(repo.head).items()}
    bare = api(hub).model_info(MODEL_NAME).siblings or []
    assert len(bare) == 46
    assert all(file.size is None for file in bare)


def test_tree_is_paged(hub: Hub, repos: Path) -> None:
    repo = ModelRepo(repos, MODEL_NAME)
    listed = list(api(hub).list_repo_tree(MODEL_NAME, recursive=True, expand=True))
    assert [file.path for file in listed] == list(repo.entries(repo.head))
    pages = [entry["query"] for entry in hub.log() if "/tree/" in entry["path"]]
    assert len(pages) == 3
    assert sum("cursor=" in query for query in pages) == 2


def test_tree_with_folders(hub: Hub, tmp_path: Path) -> None:
    hub.state.repos = tmp_path
    repo = make_bench_repo(tmp_path, [10])
    repo.change("a/b/c.txt", b"text", branch="main")
    client = api(hub)
    assert [item.path for item in client.list_repo_tree(repo.name)] == ["a", "file-00001.bin"]
    assert [item.path for item in client.list_repo_tree(repo.name, "a")] == ["a/b"]
    everything = [item.path for item in client.list_repo_tree(repo.name, recursive=True)]
    assert everything == ["a", "a/b", "a/b/c.txt", "file-00001.bin"]


def test_paths_info_and_refs(hub: Hub, repos: Path) -> None:
    (file,) = api(hub).get_paths_info(MODEL_NAME, [SHARD, "absent"])
    assert file.path == SHARD
    (branch,) = api(hub).list_repo_refs(MODEL_NAME).branches
    assert (branch.name, branch.target_commit) == ("main", ModelRepo(repos, MODEL_NAME).head)


@pytest.mark.parametrize("plain_redirect", [False, True])
@pytest.mark.parametrize("path", [SHARD, "config.json"])
def test_download_equals_source(hub: Hub, repos: Path, tmp_path: Path, path: str, plain_redirect: bool) -> None:
    hub.control(plain_redirect=plain_redirect)
    assert download(hub, path, tmp_path).read_bytes() == ModelRepo(repos, MODEL_NAME).source(path).read_bytes()
    assert any(entry["host"] == "content" for entry in hub.log()) == (path == SHARD)
    assert any("resolve-cache" in entry["path"] for entry in hub.log()) == (plain_redirect and path != SHARD)


def test_snapshot_of_a_prefix(hub: Hub, repos: Path, tmp_path: Path) -> None:
    repo = ModelRepo(repos, ENGRAM_NAME)
    wanted = ["model-00047-of-00048.safetensors", "model-00048-of-00048.safetensors"]
    snapshot_download(
        ENGRAM_NAME,
        revision=repo.head[:8],
        allow_patterns=wanted,
        endpoint=hub.endpoint,
        local_dir=tmp_path,
        token=False,
    )
    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == wanted
    assert all((tmp_path / name).read_bytes() == repo.source(name).read_bytes() for name in wanted)


def test_headers_of_a_resolved_file(hub: Hub, repos: Path) -> None:
    repo = ModelRepo(repos, MODEL_NAME)
    entry, plain = repo.entries(repo.head)[SHARD], repo.entries(repo.head)["config.json"]
    lfs_reply = fetch(f"{hub.endpoint}/{MODEL_NAME}/resolve/main/{SHARD}", "HEAD")
    assert lfs_reply.status == 302
    assert lfs_reply.headers["X-Repo-Commit"] == repo.head
    assert lfs_reply.headers["X-Linked-Etag"] == f'"{entry.sha256}"'
    assert lfs_reply.headers["X-Linked-Size"] == str(entry.size)
    plain_reply = fetch(f"{hub.endpoint}/{MODEL_NAME}/resolve/main/config.json", "HEAD")
    assert plain_reply.headers["ETag"] == f'"{plain.blob_id}"'
    assert plain_reply.headers["Content-Length"] == str(plain.size)
    assert not any(name.lower().startswith("x-xet") for name in lfs_reply.headers)


def test_unknown_things_have_their_own_errors(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(RepositoryNotFoundError):
        api(hub).model_info("nobody/nothing")
    with pytest.raises(RevisionNotFoundError):
        api(hub).model_info(MODEL_NAME, revision="abcdef0123")
    with pytest.raises(RemoteEntryNotFoundError):
        download(hub, "absent.json", tmp_path)


def test_ranges(hub: Hub, repos: Path) -> None:
    content, link = ModelRepo(repos, MODEL_NAME).source(SHARD).read_bytes(), link_to(hub)
    for text, part in {
        "bytes=0-0": content[:1],
        "bytes=100-199": content[100:200],
        "bytes=1000-": content[1000:],
        "bytes=-7": content[-7:],
    }.items():
        reply = fetch(link, Range=text)
        assert (reply.status, reply.body) == (206, part), text
    assert fetch(link, Range="bytes=100-199").headers["Content-Range"] == f"bytes 100-199/{len(content)}"
    beyond = fetch(link, Range=f"bytes={len(content)}-")
    assert (beyond.status, beyond.headers["Content-Range"]) == (416, f"bytes */{len(content)}")
    assert fetch(link, Range="lines=1-2").status == 200


def test_token_is_needed_and_checked(repos: Path, tmp_path: Path) -> None:
    with running_hub(repos, token=TOKEN) as hub:
        assert api(hub, TOKEN).whoami()["name"] == "lab"
        assert api(hub, TOKEN).model_info(MODEL_NAME).private
        with pytest.raises(RepositoryNotFoundError):
            api(hub).model_info(MODEL_NAME)
        with pytest.raises(HfHubHTTPError, match="Invalid credentials") as caught:
            api(hub, "hf_wrong").model_info(MODEL_NAME)
        assert caught.value.response.status_code == 401
        hub.state.set_access(MODEL_NAME, "public")
        assert download(hub, "config.json", tmp_path).is_file()


def test_gated_files_are_refused(repos: Path, tmp_path: Path) -> None:
    with running_hub(repos, token=TOKEN) as hub:
        hub.control(access={MODEL_NAME: "gated"})
        assert api(hub, TOKEN).model_info(MODEL_NAME).gated == "manual"
        for token, status in ((TOKEN, 403), (False, 401)):
            with pytest.raises(GatedRepoError) as caught:
                download(hub, "config.json", tmp_path, token)
            assert caught.value.response.status_code == status


def test_token_stays_with_the_hub(repos: Path, tmp_path: Path) -> None:
    with running_hub(repos, token=TOKEN) as hub:
        download(hub, SHARD, tmp_path, TOKEN)
        seen = {(entry["host"], entry["had_token"]) for entry in hub.log()}
        assert seen == {("hub", True), ("content", False)}
        leak = fetch(link_to(hub, token=TOKEN), Authorization=f"Bearer {TOKEN}")
        assert leak.status == 400
        assert [entry["status"] for entry in hub.log() if entry["host"] == "content" and entry["had_token"]] == [400]


def test_links_carry_the_content_name(repos: Path) -> None:
    with Hub(repos) as hub:
        assert hub.endpoint == f"http://hub.lab:{hub.port}"
        reply = fetch(f"http://127.0.0.1:{hub.port}/{MODEL_NAME}/resolve/main/{SHARD}", Host=f"hub.lab:{hub.port}")
        assert reply.headers["Location"].startswith(f"http://cdn.lab:{hub.content_port}/lfs/{MODEL_NAME}/")
        tree = fetch(f"http://127.0.0.1:{hub.port}/api/models/{MODEL_NAME}/tree/main", Host=f"hub.lab:{hub.port}")
        assert tree.headers["Link"].startswith(f"<http://hub.lab:{hub.port}/api/models/{MODEL_NAME}/tree/main?")


def test_links_expire_and_cannot_be_forged(hub: Hub) -> None:
    link = link_to(hub)
    assert fetch(link).status == 200
    assert fetch(link.replace("Signature=", "Signature=0")).status == 403
    assert fetch(link.replace("00003", "00004")).status == 403
    hub.control(signature_seconds=-1)
    assert fetch(link_to(hub)).status == 403


def test_log_tells_what_was_served(hub: Hub) -> None:
    fetch(link_to(hub), Range="bytes=10-19")
    resolve, content = hub.log()
    assert (resolve["host"], resolve["method"], resolve["status"], resolve["bytes_sent"]) == ("hub", "HEAD", 302, 0)
    assert (content["host"], content["status"], content["range"]) == ("content", 206, "bytes=10-19")
    assert content["bytes_sent"] == 10
    assert content["client"] == "127.0.0.1"


def test_files_area_serves_nothing_else(repos: Path, hub: Hub) -> None:
    publish_file(repos, "templates/chat.jinja", b"{{ messages }}")
    assert fetch(f"{hub.endpoint}/files/templates/chat.jinja").body == b"{{ messages }}"
    assert fetch(f"{hub.endpoint}/files/..%2Flab%2Fchat-template%2Frefs.json").status == 404


def test_git_over_plain_files(repos: Path, hub: Hub, tmp_path: Path) -> None:
    first = publish_commit(repos, "engine", {"setup.py": "one"})
    second = publish_commit(repos, "engine", {"setup.py": "two", "src/engine.py": "pass"})
    url = f"{hub.endpoint}/git/engine.git"
    assert git("ls-remote", url, "refs/heads/main").split() == [second, "refs/heads/main"]
    clone = tmp_path / "clone"
    git("clone", "--quiet", url, str(clone))
    assert git("rev-parse", "HEAD", "HEAD~1", directory=clone).split() == [second, first]
    third = publish_commit(repos, "engine", {"setup.py": "three"})
    git("fetch", "--quiet", "origin", directory=clone)
    assert git("show", f"{third}:setup.py", directory=clone) == "three"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        git("clone", "--quiet", "--depth=1", url, str(tmp_path / "shallow"))
    assert "dumb http transport does not support shallow" in caught.value.stderr


def test_git_of_a_smart_server(repos: Path, hub: Hub, tmp_path: Path) -> None:
    commits = [publish_commit(repos, "smart", {"setup.py": f"{number}"}) for number in range(3)]
    url = f"{hub.endpoint}/smart-git/smart.git"
    assert git("ls-remote", url, "refs/heads/main").split() == [commits[2], "refs/heads/main"]
    clone = tmp_path / "shallow"
    git("clone", "--quiet", "--depth=1", url, str(clone))
    assert git("rev-list", "HEAD", directory=clone).split() == [commits[2]]
    git("fetch", "--quiet", "--depth=1", "origin", commits[0], directory=clone)
    assert git("show", "FETCH_HEAD:setup.py", directory=clone) == "0"
    assert fetch(f"{hub.endpoint}/smart-git/absent.git/info/refs?service=git-upload-pack").status == 404


def test_hub_as_a_process(repos: Path) -> None:
    command = [sys.executable, "-m", "tests.lab.hub", "--repos", str(repos), "--hub-name", "", "--content-name", ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            endpoint = json.loads(process.stdout.readline())["endpoint"]
            whoami, control = f"{endpoint}/api/whoami-v2", f"{endpoint}/_lab/control"
            fault = {"fault": "status", "match": {"path_regex": "whoami"}, "status": 503, "times": 1}
            assert fetch(control, "POST", json.dumps({"faults": [fault], "rate": 1e6}).encode()).status == 200
            assert [fetch(whoami).status for _ in range(2)] == [503, 401]
            refused = fetch(control, "POST", b'{"rats": 1}')
            assert (refused.status, "rats" in refused.body.decode()) == (400, True)
            log = json.loads(fetch(f"{endpoint}/_lab/log").body)
            assert [(entry["path"], entry["status"]) for entry in log["requests"]] == [
                ("/api/whoami-v2", 503),
                ("/api/whoami-v2", 401),
            ]
            assert log["failures"] == []
            assert fetch(f"{endpoint}/_lab/reset", "POST").status == 200
            assert json.loads(fetch(f"{endpoint}/_lab/log").body)["requests"] == []
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
