"""The chat template: fetched at a pinned hash, the recipe's own prologue in front, proved, and put on both nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sparkserve.cluster import Deployment, Node, Role
from sparkserve.errors import SparkserveError
from sparkserve.hub import hub_refused, hub_unreachable
from sparkserve.lock import LockedTemplate
from sparkserve.manifest import ManifestFile
from sparkserve.plan import Change, Work, key_of
from sparkserve.settings import Settings
from sparkserve.template_proof import prove

STEP = "template"
_SECONDS = 30.0
Maker = Callable[[Deployment, Work], str]


@dataclass(frozen=True)
class Facts:
    """Hashes (sha256) of the patched template on a node; what it should be is known once the head has the original."""

    found: str | None
    wanted: str | None = None


def gather(node: Node, deployment: Deployment) -> Facts:
    """Look at the patched template of a node, and on the head also at the fetched original."""
    if deployment.lock.chat_template is None:
        return Facts(None)
    content = _read(node, path_on(node, deployment))
    found = None if content is None else hashlib.sha256(content).hexdigest()
    if node.role == "worker":
        return Facts(found)
    original = _read(node, original_path(node, deployment.lock.chat_template))
    if original is None or not _is_right(deployment.lock.chat_template.file, original):
        return Facts(found)
    return Facts(found, hashlib.sha256(patch(deployment, original)).hexdigest())


def plan(deployment: Deployment, facts: Mapping[Role, Facts]) -> list[Change]:
    """Plan the template where a node lacks it; its name is known before it is fetched."""
    if deployment.lock.chat_template is None:
        return []
    name = name_of(deployment)
    wanted = facts["head"].wanted
    makers: dict[Role, Maker] = {"head": make, "worker": copy}
    after = f"pinned {deployment.lock.chat_template.file.digest[:12]} with our prologue"
    changes = []
    for role, maker in makers.items():
        found = facts[role].found
        if wanted is not None and found == wanted:
            continue
        before = "absent" if found is None else f"other content {found[:12]}" if wanted else "not known to be right"
        needs = () if role == "head" else (key_of("head", STEP, name),)

        def action(work: Work, maker: Maker = maker) -> str:
            return maker(deployment, work)

        changes.append(Change(role, STEP, name, before, after, action, needs))
    return changes


def name_of(deployment: Deployment) -> str:
    """Give the patched template's file name: the hash of all that it is made of."""
    made_of = b"\0".join([_template(deployment).file.digest.encode(), _front(deployment)])
    return f"{hashlib.sha256(made_of).hexdigest()[:16]}.jinja"


def path_on(node: Node, deployment: Deployment) -> str:
    """Give the path of the patched template on a node, for the engine's mounts."""
    return f"{node.cache_dir}/templates/{name_of(deployment)}"


def original_path(node: Node, template: LockedTemplate) -> str:
    """Give the path of the template as it was fetched; it is kept so that later runs need no network."""
    return f"{node.cache_dir}/templates/original-{template.file.digest[:16]}.jinja"


def default_thinking(deployment: Deployment) -> bool | None:
    """Say whether replies think when a request leaves it open: the owner's word, or else the recipe's."""
    own = deployment.settings.thinking
    return deployment.recipe.parameters.thinking if own is None else own


def patch(deployment: Deployment, original: bytes) -> bytes:
    """Put our lines in front of the template; its own lines stay as they are."""
    return _front(deployment) + original


def _front(deployment: Deployment) -> bytes:
    wanted = deployment.recipe.chat_template
    thinking = default_thinking(deployment)
    default = "" if thinking is None else f"{{%- set default_thinking = {str(thinking).lower()} -%}}\n"
    prologue = deployment.recipe.file(wanted.prologue) if wanted and wanted.prologue else b""
    return default.encode() + prologue if prologue else b""


def make(deployment: Deployment, work: Work) -> str:
    """On the head: fetch unless it is there, patch, prove, write."""
    head, template = deployment.cluster.head, _template(deployment)
    original = _read(head, original_path(head, template))
    if original is None or not _is_right(template.file, original):
        work.note(f"fetching {template.file.path} of {template.repository}")
        original = _fetch(deployment.settings, template)
        _write(head, original_path(head, template), original)
    work.check()
    patched = patch(deployment, original)
    verification = deployment.recipe.verification
    # Without a prologue the default is the engine's business, by its command line.
    default = default_thinking(deployment) if _front(deployment) else None
    proof = prove(
        patched,
        default=default,
        thinking_on=verification.thinking_on,
        thinking_off=verification.thinking_off,
    )
    _write(head, path_on(head, deployment), patched)
    return proof


def copy(deployment: Deployment, work: Work) -> str:
    """On the worker: the same bytes as on the head."""
    work.note("copying from the head")
    content = deployment.cluster.head.host.read(path_on(deployment.cluster.head, deployment))
    return _write(deployment.cluster.worker, path_on(deployment.cluster.worker, deployment), content)


def _template(deployment: Deployment) -> LockedTemplate:
    template = deployment.lock.chat_template
    if template is None:
        raise ValueError("asked for the template of a recipe that has none")
    return template


def _read(node: Node, path: str) -> bytes | None:
    """Read a small file; None only where there is none."""
    asked = [{"path": path, "algorithm": "sha256"}]
    kind = node.session.ask("look", store=node.proofs_file, files=asked)[path]["kind"]
    if kind == "missing":
        return None
    if kind != "file":
        message = f"{path} is no file that we can read: {kind}"
        raise SparkserveError("template_unreadable", message, f"ls -l {path}", node.role)
    return node.host.read(path)


def _write(node: Node, path: str, content: bytes) -> str:
    """Write a file and prove by its hash that the node has it."""
    node.session.ask("mkdir", paths=[path.rpartition("/")[0]])
    node.host.write(path, content)
    wanted = hashlib.sha256(content).hexdigest()
    found = hashlib.sha256(node.host.read(path)).hexdigest()
    if found != wanted:
        message = f"{path} has sha256 {found[:12]} after writing; needed: {wanted[:12]}"
        raise SparkserveError("template_differs", message, "sparkserve template", node.role)
    return f"sha256 {found[:12]}"


def _is_right(file: ManifestFile, content: bytes) -> bool:
    if len(content) != file.size:
        return False
    if file.sha256:
        return hashlib.sha256(content).hexdigest() == file.sha256
    blob = b"blob %d\0" % len(content) + content
    return hashlib.sha1(blob, usedforsecurity=False).hexdigest() == file.git_sha1


def _fetch(settings: Settings, template: LockedTemplate) -> bytes:
    """Fetch one file at its commit, and refuse anything but the locked content."""
    import httpx

    address = f"{settings.hf_endpoint}/{template.repository}/resolve/{template.commit}/{template.file.path}"
    token = settings.hf_token.get_secret_value() if settings.hf_token else ""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        # The client drops the token by itself where the hub sends it on to another host.
        answer = httpx.get(address, headers=headers, follow_redirects=True, timeout=_SECONDS)
    except httpx.TransportError as error:
        raise hub_unreachable(settings, template.repository, str(error)) from error
    if answer.status_code != 200:
        raise hub_refused(settings, template.repository, answer.status_code, answer.text[:500])
    if not _is_right(template.file, answer.content):
        message = f"{template.file.path} of {template.repository} does not have the locked hash"
        details = f"{len(answer.content)} bytes; needed: {template.file.size} bytes, {template.file.digest}"
        raise SparkserveError("template_differs", message, "sparkserve lock --update", "head", details)
    return answer.content
