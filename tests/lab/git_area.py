"""Bare git repositories below the hub's root: as plain files (`/git/`), and behind a smart server (`/smart-git/`).

Plain files are enough for `ls-remote`, `clone` and `fetch`; shallow fetches and fetches of a commit need the smart one.
"""

import gzip
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.lab.hub_http import Answer, Request, error_answer

GIT_AREA = "_git"
FILES_AREA = "_files"
_WHO = {
    "GIT_AUTHOR_NAME": "lab",
    "GIT_AUTHOR_EMAIL": "lab@example.invalid",
    "GIT_AUTHOR_DATE": "2026-09-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "lab",
    "GIT_COMMITTER_EMAIL": "lab@example.invalid",
    "GIT_COMMITTER_DATE": "2026-09-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


def git(*arguments: str, directory: Path | None = None) -> str:
    """Run git without the machine's own configuration and return what it printed."""
    environment = {**os.environ, **_WHO}
    return subprocess.run(
        ["git", *arguments], cwd=directory, env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


def publish_commit(root: Path, name: str, files: Mapping[str, str], *, branch: str = "main") -> str:
    """Add a commit of these files, where they changed, to `/git/<name>.git` (made when absent); give its id."""
    bare = root / GIT_AREA / f"{name}.git"
    if not bare.exists():
        git("init", "--quiet", "--bare", f"--initial-branch={branch}", str(bare))
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        git("clone", "--quiet", str(bare), str(tree))
        git("checkout", "--quiet", "-B", branch, directory=tree)
        for path, text in files.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
        git("add", "--all", directory=tree)
        if git("status", "--porcelain", directory=tree):
            git("commit", "--quiet", "--message", f"{name}: {len(files)} files", directory=tree)
            git("push", "--quiet", "origin", branch, directory=tree)
        commit = git("rev-parse", "HEAD", directory=tree)
    git("update-server-info", directory=bare)
    return commit


def publish_directory(root: Path, name: str, directory: Path) -> str:
    """Commit a directory of large files as it is, without trying to make them smaller; give the commit's id."""
    bare = root / GIT_AREA / f"{name}.git"
    if not bare.exists():
        git("init", "--quiet", "--bare", "--initial-branch=main", str(bare))
        for key, value in (("core.bigFileThreshold", "1m"), ("core.compression", "0"), ("pack.window", "0")):
            git("config", key, value, directory=bare)
    place = (f"--git-dir={bare}", f"--work-tree={directory}")
    git(*place, "add", "--all", directory=directory)
    if git(*place, "status", "--porcelain", directory=directory):
        git(*place, "commit", "--quiet", "--message", name, directory=directory)
    return git("rev-parse", "main", directory=bare)


def publish_file(root: Path, path: str, content: bytes) -> Path:
    """Put a raw file below `/files/`."""
    target = root / FILES_AREA / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    return target


def smart_answer(request: Request, root: Path, path: str) -> Answer:
    """Answer `<name>.git/info/refs` and `<name>.git/git-upload-pack` as a public git host does, any commit included."""
    name, _, page = path.partition("/")
    bare = root / GIT_AREA / name
    if page not in ("info/refs", "git-upload-pack") or name.startswith(".") or not bare.is_dir():
        return error_answer(404, f"no such git page: {path}")
    content = request.content
    if request.headers.get("Content-Encoding") == "gzip":
        content = gzip.decompress(content)
    advertise = page == "info/refs"
    allowed = ["-c", "uploadpack.allowAnySHA1InWant=true", "-c", "uploadpack.allowFilter=true"]
    command = ["git", *allowed, "upload-pack", "--stateless-rpc"]
    command += ["--advertise-refs", str(bare)] if advertise else [str(bare)]
    environment = {**os.environ, **_WHO, "GIT_PROTOCOL": request.headers.get("Git-Protocol", "")}
    done = subprocess.run(command, input=content, env=environment, check=False, capture_output=True)
    body = done.stdout
    if not body:  # a refusal is said in the body; silence is a failure of ours
        raise RuntimeError(done.stderr.decode())
    if advertise:
        body = b"001e# service=git-upload-pack\n0000" + body
    kind = "advertisement" if advertise else "result"
    return Answer(200, {"Content-Type": f"application/x-git-upload-pack-{kind}", "Cache-Control": "no-cache"}, body)
