"""Git as far as we need it: the refs of a repository, and the tree of one commit of it."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable

from sparkserve.errors import SparkserveError
from sparkserve.hosts import Host
from sparkserve.streams import follow

# No prompt for a password, and none of git's transports that run commands.
GIT = ("env", "GIT_TERMINAL_PROMPT=0", "GIT_ALLOW_PROTOCOL=file:git:http:https:ssh", "git")
_REFS_SECONDS = 60.0


def unreachable(repository: str, details: str) -> SparkserveError:
    """Say that the engine's repository cannot be read, and what to set."""
    hint = "set SPARKSERVE_ENGINE_REPOSITORY (and SPARKSERVE_ENGINE_REVISION) in .env to one that you can read"
    message = f"cannot read the engine's repository {repository}"
    return SparkserveError("source_unreachable", message, hint, details=details)


def list_refs(host: Host, repository: str) -> dict[str, str]:
    """Ask a repository for its branches and tags: name to commit."""
    try:
        answer = host.run([*GIT, "ls-remote", "--", repository], timeout=_REFS_SECONDS, check=False)
    except SparkserveError as error:
        raise unreachable(repository, str(error)) from error
    if answer.exit_code == 127:
        raise SparkserveError("tool_missing", "cannot run `git`", "sudo apt-get install git", host.name)
    if answer.exit_code != 0:
        raise unreachable(repository, answer.error_text)
    pairs = (line.split("\t", 1) for line in answer.text.splitlines() if "\t" in line)
    return {name: commit for commit, name in pairs}


def lacks_commit(host: Host, repository: str, commit: str) -> bool:
    """Whether a repository says that it has no such commit; one that gives no single commits does not say."""
    with tempfile.TemporaryDirectory(prefix="sparkserve-") as place:
        host.run([*GIT, "init", "--quiet", "--bare", place])
        git = [*GIT, f"--git-dir={place}"]
        wanted = ["--depth", "1", "--filter=tree:0", "--no-tags", "--", repository, commit]
        answer = host.run([*git, "fetch", "--quiet", *wanted], timeout=_REFS_SECONDS, check=False)
    return answer.exit_code != 0 and "not our ref" in answer.error_text


def fetch_commit(host: Host, repository: str, commit: str, below: str, check: Callable[[], None]) -> str:
    """Bring one commit into a bare repository below a directory; give that repository's path."""
    place = f"{below}/{hashlib.sha256(repository.encode()).hexdigest()[:16]}.git"
    git = [*GIT, f"--git-dir={place}"]
    # A ref of ours is set only after a whole fetch: the commit alone may be there without its files.
    done = f"refs/sparkserve/{commit}"
    if host.run([*git, "rev-parse", "--verify", "--quiet", done], check=False).exit_code == 0:
        return place
    host.run([*GIT, "init", "--quiet", "--bare", place])
    fetched = follow(host, [*git, "fetch", "--depth", "1", "--no-tags", "--", repository, commit], check)
    if fetched.exit_code != 0:  # plain file servers and old ones give no single commit
        everything = ("+refs/heads/*:refs/remote/heads/*", "+refs/tags/*:refs/remote/tags/*")
        fetched = follow(host, [*git, "fetch", "--no-tags", "--", repository, *everything], check)
    if fetched.exit_code != 0:
        raise unreachable(repository, fetched.text)
    marked = host.run([*git, "update-ref", done, commit], check=False)
    if marked.exit_code != 0:
        message = f"the engine's repository {repository} has no commit {commit} in any branch or tag"
        hint = "`sparkserve lock --update` resolves the engine anew; SPARKSERVE_ENGINE_REVISION names another"
        raise SparkserveError("engine_revision", message, hint, host.name, marked.error_text)
    return place


def export_commit(host: Host, place: str, commit: str, directory: str, check: Callable[[], None]) -> None:
    """Write the files of a fetched commit below `<directory>/engine`."""
    archive = f"{directory}/engine.tar"
    steps = (
        [*GIT, f"--git-dir={place}", "archive", "--format=tar", "--prefix=engine/", f"--output={archive}", commit],
        ["tar", "--extract", "--file", archive, "--directory", directory],
        ["rm", "--", archive],
    )
    for argv in steps:
        result = follow(host, argv, check)
        if result.exit_code != 0:
            message = f"cannot write the engine's files at {commit[:12]}"
            raise SparkserveError("engine_source", message, f"rm -rf {place}", host.name, result.text)
