"""The hub's own pages, in the words that huggingface_hub understands."""

import base64
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode

from tests.lab.hub_content import ContentSite
from tests.lab.hub_http import Answer, Request, error_answer, file_answer, json_answer
from tests.lab.hub_state import HubState
from tests.lab.repo_store import Entry, ModelRepo

_DATE = "2026-09-01T00:00:00.000Z"
_API = re.compile(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree|paths-info|refs)(?:/([^/]+))?(?:/(.+))?)?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_RESOLVE_CACHE = re.compile(r"/api/resolve-cache/models/([^/]+/[^/]+)/([^/]+)/(.+)")
BAD_TOKEN = "Invalid credentials in Authorization header"
NO_TOKEN = "Invalid username or password."


@dataclass(frozen=True)
class Asked:
    """A request for something in a repository at a commit."""

    request: Request
    repo: ModelRepo
    commit: str
    path: str

    def entries(self) -> list[Entry]:
        """Return the files of the commit."""
        return list(self.repo.entries(self.commit).values())


class HubPages:
    """Everything below `/api/` and `/<org>/<name>/resolve/`."""

    def __init__(self, state: HubState, content: ContentSite, content_origin: Callable[[Request], str]) -> None:
        self.state = state
        self.content = content
        self.content_origin = content_origin

    def __call__(self, request: Request) -> Answer:
        """Answer one request."""
        if request.record.had_token and self.state.token is not None and request.token != self.state.token:
            return error_answer(401, BAD_TOKEN)
        if request.path == "/api/whoami-v2":
            return self._whoami(request)
        if found := _RESOLVE_CACHE.fullmatch(request.path) or _RESOLVE.fullmatch(request.path):
            name, revision, path = (unquote(part) for part in found.groups())
            return self._in_repo(request, name, revision, path, self._resolve)
        if found := _API.fullmatch(request.path):
            name, page, revision, path = (unquote(part or "") for part in found.groups())
            pages = {"": self._info, "revision": self._info, "tree": self._tree, "paths-info": self._paths_info}
            return self._in_repo(request, name, revision or "main", path, pages.get(page, self._refs))
        return error_answer(404, "Sorry, we can't find the page you are looking for.")

    def _in_repo(
        self, request: Request, name: str, revision: str, path: str, page: Callable[[Asked], Answer]
    ) -> Answer:
        """Find repository and commit, and let in whoever may read it."""
        repo = self.state.repo(name)
        if repo is None:
            return error_answer(404, "Repository not found", "RepoNotFound")
        access = self.state.access_to(name)
        if access == "token" and not request.token:
            # Without a token the public hub does not tell a private repository from a missing one.
            return error_answer(401, NO_TOKEN, "RepoNotFound")
        if access == "gated" and page == self._resolve:
            message = f"Access to model {name} is restricted and you are not in the authorized list."
            return error_answer(403 if request.token else 401, message, "GatedRepo")
        commit = self.state.commit_of(repo, revision)
        if commit is None:
            return error_answer(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return page(Asked(request, repo, commit, path))

    def _whoami(self, request: Request) -> Answer:
        if not request.token:
            return error_answer(401, NO_TOKEN)
        return json_answer({"type": "user", "name": "lab", "auth": {"accessToken": {"role": "read"}}})

    def _info(self, asked: Asked) -> Answer:
        request, name = asked.request, asked.repo.name
        entries = asked.entries()
        if request.fault("cut_listing"):
            entries = entries[: self.state.settings.page_size]
        siblings: list[dict[str, Any]] = [{"rfilename": entry.path} for entry in entries]
        if request.query.get("blobs", "").lower() in ("true", "1"):
            masked = request.fault("mask_hash") is not None
            siblings = [_sibling(entry, masked) for entry in entries]
        gated = "manual" if self.state.access_to(name) == "gated" else False
        return json_answer(
            {
                "id": name,
                "modelId": name,
                "author": name.split("/")[0],
                "sha": asked.commit,
                "lastModified": _DATE,
                "createdAt": _DATE,
                "private": self.state.access_to(name) == "token",
                "gated": gated,
                "disabled": False,
                "tags": [],
                "siblings": siblings,
            }
        )

    def _refs(self, asked: Asked) -> Answer:
        branches = self.state.branches_of(asked.repo).items()
        refs = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit} for name, commit in branches]
        return json_answer({"branches": refs, "tags": [], "converts": []})

    def _tree(self, asked: Asked) -> Answer:
        """Answer one page of a listing; the next one is named in a Link header."""
        request, query = asked.request, asked.request.query
        entries, folder = asked.entries(), f"{asked.path}/" if asked.path else ""
        inside = [entry for entry in entries if entry.path.startswith(folder)]
        if not inside:
            return _no_entry(asked)
        expand, recursive = query.get("expand", "").lower() == "true", query.get("recursive", "").lower() == "true"
        masked = request.fault("mask_hash") is not None
        items = [
            _tree_item(entry, asked.commit if expand else None, masked)
            for entry in inside
            if recursive or "/" not in entry.path[len(folder) :]
        ]
        items = _folders(inside, folder, recursive) + items
        start, size = _cursor_start(query.get("cursor")), self.state.settings.page_size
        headers = {"X-Repo-Commit": asked.commit}
        if start + size < len(items) and not request.fault("cut_listing"):
            following = urlencode({**query, "cursor": _cursor(start + size)})
            headers["Link"] = f'<{request.origin}{request.path}?{following}>; rel="next"'
        return json_answer(items[start : start + size], headers=headers)

    def _paths_info(self, asked: Asked) -> Answer:
        content = asked.request.content
        if asked.request.headers.get_content_type() == "application/json":
            wanted = json.loads(content)["paths"]
        else:
            wanted = parse_qs(content.decode()).get("paths", [])
        masked = asked.request.fault("mask_hash") is not None
        return json_answer([_tree_item(entry, None, masked) for entry in asked.entries() if entry.path in wanted])

    def _resolve(self, asked: Asked) -> Answer:
        """Answer with a plain file itself, or with a link to an LFS file."""
        entry = asked.repo.entries(asked.commit).get(asked.path)
        if entry is None:
            return _no_entry(asked)
        headers = {"X-Repo-Commit": asked.commit, "ETag": f'"{entry.etag}"'}
        linked = {**headers, "X-Linked-Etag": f'"{entry.etag}"', "X-Linked-Size": str(entry.size)}
        if entry.sha256:
            link = self.content_origin(asked.request) + self.content.link(asked.repo.name, entry)
            return Answer(302, {**linked, "Location": link}, f"Found. Redirecting to {link}".encode())
        if self.state.settings.plain_redirect and not asked.request.path.startswith("/api/"):
            place = f"/api/resolve-cache/models/{asked.repo.name}/{asked.commit}/{quote(asked.path)}"
            return Answer(307, {**linked, "Location": place})
        return file_answer(asked.repo.blob(entry), headers)


def _no_entry(asked: Asked) -> Answer:
    answer = error_answer(404, "Entry not found", "EntryNotFound")
    answer.headers["X-Repo-Commit"] = asked.commit
    return answer


def _sibling(entry: Entry, masked: bool) -> dict[str, Any]:
    item: dict[str, Any] = {"rfilename": entry.path, "size": entry.size, "blobId": entry.blob_id}
    if entry.sha256 and not masked:
        item["lfs"] = {"sha256": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
    return item


def _tree_item(entry: Entry, commit: str | None, masked: bool) -> dict[str, Any]:
    item: dict[str, Any] = {"type": "file", "oid": entry.blob_id, "size": entry.size, "path": entry.path}
    if entry.sha256 and not masked:
        item["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
    if commit is not None:
        item["lastCommit"] = {"id": commit, "title": "Upload files", "date": _DATE}
    return item


def _folders(inside: Iterable[Entry], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """List the folders below `folder`: all of them, or only the nearest."""
    found: set[str] = set()
    for entry in inside:
        steps = entry.path[len(folder) :].split("/")[:-1]
        depths = range(1, len(steps) + 1) if recursive else range(1, min(len(steps), 1) + 1)
        found.update(folder + "/".join(steps[:depth]) for depth in depths)
    return [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in sorted(found)]


def _cursor(start: int) -> str:
    return base64.urlsafe_b64encode(f"lab:{start}".encode()).decode()


def _cursor_start(cursor: str | None) -> int:
    return int(base64.urlsafe_b64decode(cursor).decode().partition(":")[2]) if cursor else 0
