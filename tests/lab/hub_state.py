"""What the hub's two sites share, and what a test may change while they run."""

import time
from dataclasses import dataclass, field, fields
from pathlib import Path

from tests.lab.hub_faults import FaultBook, Json
from tests.lab.hub_http import RequestLog
from tests.lab.hub_rate import RateLimit
from tests.lab.repo_store import ModelRepo

ACCESS = ("public", "token", "gated")


@dataclass
class Settings:
    """Knobs that may be turned at any time; rates are in bytes per second, None means without limit."""

    rate: float | None = None
    connection_rate: float | None = None
    page_size: int = 20
    signature_seconds: float = 3600.0
    plain_redirect: bool = False


@dataclass
class HubState:
    """Repositories, log, faults and settings of one hub."""

    repos: Path
    token: str | None = None
    settings: Settings = field(default_factory=Settings)
    log: RequestLog = field(default_factory=RequestLog)
    faults: FaultBook = field(default_factory=FaultBook)
    access: dict[str, str] = field(default_factory=dict)
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rate = RateLimit(lambda: self.settings.rate)

    def repo(self, name: str) -> ModelRepo | None:
        """Return a repository, if there is one of that name."""
        repo = ModelRepo(self.repos, name)
        return repo if repo.exists else None

    def access_to(self, name: str) -> str:
        """Tell who may read a repository: by default all, or every holder of the hub's token where it has one."""
        return self.access.get(name, "public" if self.token is None else "token")

    def branches_of(self, repo: ModelRepo) -> dict[str, str]:
        """Return the branches, as moved since the start."""
        return {**repo.branches(), **self.branches.get(repo.name, {})}

    def commit_of(self, repo: ModelRepo, revision: str) -> str | None:
        """Resolve a revision, honouring moved branches."""
        return self.branches.get(repo.name, {}).get(revision) or repo.resolve(revision)

    def move_branch(self, repo: str, branch: str, commit: str) -> None:
        """Let a branch name another commit, until the next reset."""
        known = self.repo(repo)
        if known is None or commit not in known.commits():
            raise ValueError(f"no commit {commit} in {repo}")
        self.branches.setdefault(repo, {})[branch] = commit

    def set_access(self, repo: str, access: str) -> None:
        """Open or close a repository: "public", "token" (any valid token) or "gated" (files refused to everyone)."""
        if access not in ACCESS:
            raise ValueError(f"access is one of {', '.join(ACCESS)}, not {access!r}")
        self.access[repo] = access

    def reset(self) -> None:
        """Forget faults, log, moved branches and changed settings."""
        self.faults.clear()
        self.log.clear()
        self.access.clear()
        self.branches.clear()
        self.settings = Settings()

    def control(self, order: Json) -> None:
        """Carry out an order of `/_lab/control`; its keys are settings and the four words below."""
        knobs = {knob.name for knob in fields(Settings)}
        unknown = order.keys() - knobs - {"clear_faults", "faults", "access", "move_branch"}
        if unknown:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
        for name in knobs & order.keys():
            setattr(self.settings, name, order[name])
        if order.get("clear_faults"):
            self.faults.clear()
        for spec in order.get("faults", []):
            self.faults.add(spec)
        for repo, access in order.get("access", {}).items():
            self.set_access(repo, access)
        if "move_branch" in order:
            self.move_branch(**order["move_branch"])

    def wait_idle(self, seconds: float = 60.0) -> list[Json]:
        """Wait until no request is being served, and return the log."""
        deadline = time.monotonic() + seconds
        while True:
            entries = self.log.entries()
            busy = [entry for entry in entries if not entry["done"]]
            if not busy:
                return entries
            if time.monotonic() > deadline:
                raise TimeoutError(f"still busy: {busy}")
            time.sleep(0.005)
