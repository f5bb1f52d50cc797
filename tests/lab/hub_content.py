"""The content server: LFS files behind signed links that expire."""

import hashlib
import hmac
import secrets
import time
from urllib.parse import parse_qs, quote, unquote

from tests.lab.hub_http import Answer, Request, error_answer, file_answer
from tests.lab.hub_state import HubState
from tests.lab.repo_store import Entry


class SignedLinks:
    """Makes and checks links; every link is new, so that one can be expired alone."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._expired: set[str] = set()

    def sign(self, path: str, seconds: float) -> str:
        """Return the query that opens `path` for this long."""
        expires, identity = f"{time.time() + seconds:.3f}", secrets.token_hex(4)
        return f"Expires={expires}&Id={identity}&Signature={self._signature(path, expires, identity)}"

    def refusal(self, path: str, query: dict[str, str]) -> str | None:
        """Return why a link does not open, or None."""
        expires, identity, signature = (query.get(name, "") for name in ("Expires", "Id", "Signature"))
        if not hmac.compare_digest(signature, self._signature(path, expires, identity)):
            return "SignatureDoesNotMatch"
        return "Request has expired" if signature in self._expired or time.time() > float(expires) else None

    def expire(self, query: dict[str, str]) -> None:
        """Let one link open nothing from now on."""
        self._expired.add(query.get("Signature", ""))

    def _signature(self, path: str, expires: str, identity: str) -> str:
        return hmac.new(self._secret, f"{path} {expires} {identity}".encode(), hashlib.sha256).hexdigest()


class ContentSite:
    """Serves `/lfs/<org>/<name>/<sha256>/<file name>` to whoever holds a link, and to nobody who shows a token."""

    def __init__(self, state: HubState) -> None:
        self.state = state
        self.links = SignedLinks()

    def link(self, repo: str, entry: Entry) -> str:
        """Return path and query of a new link to a file."""
        path = f"/lfs/{repo}/{entry.sha256}/{quote(entry.path)}"
        return f"{path}?{self.links.sign(path, self.state.settings.signature_seconds)}"

    def __call__(self, request: Request) -> Answer:
        """Answer one request."""
        if request.record.had_token:
            return error_answer(400, "InvalidArgument: only one authentication mechanism is allowed")
        query = {name: values[0] for name, values in parse_qs(request.record.query).items()}
        if request.fault("expire"):
            self.links.expire(query)
        if refusal := self.links.refusal(request.path, query):
            return error_answer(403, refusal)
        _, _, organisation, name, sha256, _ = request.path.split("/", 5)
        repo = self.state.repo(unquote(f"{organisation}/{name}"))
        blob = repo.directory / "blobs" / sha256 if repo else None
        if blob is None or not blob.is_file():
            return error_answer(404, "NoSuchKey")
        return file_answer(blob, {"ETag": f'"{sha256}"'})
