"""The chat template: fetched at a pinned hash, the recipe's own prologue in front, proved, and put on both nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial

from sparkserve import derive
from sparkserve.cluster import Deployment, Node, Role
from sparkserve.errors import SparkserveError
from sparkserve.hub import hub_refused, hub_unreachable
from sparkserve.lock import LockedTemplate
from sparkserve.manifest import ManifestFile
from sparkserve.parameters import decide_parameters
from sparkserve.plan import Change, Work, key_of
from sparkserve.settings import Settings
from sparkserve.template_proof import prove

STEP = "template"
_SECONDS = 30.0


def gather(node: Node, deployment: Deployment) -> derive.Facts:
    """Look at the patched template of a node."""
    return derive.look(node, {STEP: path_on(node, deployment)} if deployment.lock.chat_template else {})


def plan(deployment: Deployment, facts: Mapping[Role, derive.Facts]) -> list[Change]:
    """Plan the template where a node lacks it; its name is known before it is fetched."""
    if deployment.lock.chat_template is None:
        return []
    name = name_of(deployment)
    after = f"pinned {deployment.lock.chat_template.file.digest[:12]} with our prologue"
    changes = []
    for role, before in derive.find_wrong(facts, STEP).items():
        maker, needs = (make, ()) if role == "head" else (copy, (key_of("head", STEP, name),))
        changes.append(Change(role, STEP, name, before, after, partial(maker, deployment), needs))
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


def _front(deployment: Deployment) -> bytes:
    """Make our lines in front of the template, whose own lines stay as they are."""
    wanted = deployment.recipe.chat_template
    thinking = decide_parameters(deployment.settings, deployment.recipe).thinking
    default = "" if thinking is None else f"{{%- set default_thinking = {str(thinking).lower()} -%}}\n"
    prologue = deployment.recipe.file(wanted.prologue) if wanted and wanted.prologue else b""
    return default.encode() + prologue if prologue else b""


def make(deployment: Deployment, work: Work) -> str:
    """On the head: fetch unless it is there, patch, prove, write."""
    head, template = deployment.cluster.head, _template(deployment)
    path = original_path(head, template)
    original = head.host.run(["cat", "--", path], check=False).stdout
    if not _is_right(template.file, original):
        work.note(f"fetching {template.file.path} of {template.repository}")
        original = _fetch(deployment.settings, template)
        derive.put(head, path, original)
    work.check()
    front, wanted = _front(deployment), deployment.recipe.verification
    patched = front + original
    # Without a prologue the default is the engine's business, by its command line.
    default = decide_parameters(deployment.settings, deployment.recipe).thinking if front else None
    proof = prove(patched, default=default, thinking_on=wanted.thinking_on, thinking_off=wanted.thinking_off)
    derive.put(head, path_on(head, deployment), patched)
    return proof


def copy(deployment: Deployment, work: Work) -> str:
    """On the worker: the same bytes as on the head."""
    work.note("copying from the head")
    content = deployment.cluster.head.host.read(path_on(deployment.cluster.head, deployment))
    return derive.put(deployment.cluster.worker, path_on(deployment.cluster.worker, deployment), content)


def _template(deployment: Deployment) -> LockedTemplate:
    template = deployment.lock.chat_template
    if template is None:
        raise ValueError("asked for the template of a recipe that has none")
    return template


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
