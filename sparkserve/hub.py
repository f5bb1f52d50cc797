"""The model hub: the files of a revision with their hashes, and what its refusals mean."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING

from sparkserve.errors import SparkserveError
from sparkserve.settings import Settings

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

DEFAULT_ENDPOINT = "https://huggingface.co"
WHOLE_COMMIT = re.compile(r"[0-9a-f]{40}")
SHORT_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_SECONDS = 30.0
_FIRST_PAUSE = 1.0


def list_files(settings: Settings, repository: str, revision: str) -> tuple[str, dict[str, RepoSibling]]:
    """Ask the hub for the commit of a revision, and for its files with sizes and hashes."""
    from huggingface_hub import HfApi, errors

    token = settings.hf_token.get_secret_value() if settings.hf_token else False
    api = HfApi(endpoint=settings.hf_endpoint, token=token)
    try:
        info = _patiently(partial(_ask, api, repository, revision))
        commit, siblings = str(info.sha), {file.rfilename: file for file in info.siblings or []}
    except (errors.OfflineModeIsEnabled, errors.HTTPError) as error:  # type: ignore[attr-defined] # their HTTP client's
        raise _explained(settings, repository, revision, error) from error
    except (ValueError, KeyError) as error:
        message = f"{settings.hf_endpoint} does not answer as a model hub does"
        raise SparkserveError("hub_failed", message, "look at HF_ENDPOINT", details=repr(error)) from error
    if not WHOLE_COMMIT.fullmatch(commit) or (SHORT_COMMIT.fullmatch(revision) and not commit.startswith(revision)):
        message = f"{settings.hf_endpoint} resolves {revision} of {repository} to {commit}"
        raise SparkserveError("hub_failed", message, "look at HF_ENDPOINT")
    return commit, siblings


def _patiently(ask: Callable[[], ModelInfo]) -> ModelInfo:
    """Ask up to three times while the hub is too busy to answer, with the pause that it asks for."""
    from huggingface_hub.errors import HfHubHTTPError

    for pause in (_FIRST_PAUSE, 2 * _FIRST_PAUSE):
        try:
            return ask()
        except HfHubHTTPError as error:
            status, asked = error.response.status_code, retry_after(error.response.headers.get("Retry-After", "")) or 0
            if (status != 429 and status < 500) or asked > _SECONDS:
                raise
            time.sleep(max(pause, asked))
    return ask()


def retry_after(value: str) -> float | None:
    """Read the header `Retry-After`, in seconds or as a date."""
    if value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time()) if value else None
    except (ValueError, TypeError):
        return None


def _ask(api: HfApi, repository: str, revision: str) -> ModelInfo:
    """Ask for a revision; a hub that knows no short commits is asked for the history, to find the whole one."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return api.model_info(repository, revision=revision, files_metadata=True, timeout=_SECONDS)
    except RevisionNotFoundError:
        if not SHORT_COMMIT.fullmatch(revision) or WHOLE_COMMIT.fullmatch(revision):
            raise
        commits = [commit.commit_id for commit in api.list_repo_commits(repository)]
        found = [commit for commit in commits if commit.startswith(revision)]
        if len(found) != 1:
            raise
        return api.model_info(repository, revision=found[0], files_metadata=True, timeout=_SECONDS)


def _explained(settings: Settings, repository: str, revision: str, error: Exception) -> SparkserveError:
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        message = f"cannot ask for {repository}: HF_HUB_OFFLINE is set"
        return SparkserveError("source_unreachable", message, "unset HF_HUB_OFFLINE")
    if isinstance(error, errors.RevisionNotFoundError):
        message = f"{repository} has no revision {revision} on {settings.hf_endpoint}"
        hint = "look at `revision` in the recipe; a mirror may lag behind"
        return SparkserveError("hub_revision", message, hint)
    if isinstance(error, errors.HfHubHTTPError):
        status = 403 if isinstance(error, errors.GatedRepoError) else error.response.status_code
        return hub_refused(settings, repository, status, error.server_message or "")
    return hub_unreachable(settings, repository, str(error))


def hub_refused(settings: Settings, repository: str, status: int, details: str = "") -> SparkserveError:
    """Explain an answer of the hub that is no success."""
    code, message, hint = _explain(settings, repository, status)
    return SparkserveError(code, message, hint, details=details)


def _explain(settings: Settings, repository: str, status: int) -> tuple[str, str, str]:
    hub = settings.hf_endpoint
    if status == 401 and settings.hf_token is None:
        message = f"{hub} wants a login for {repository}, or there is no such repository"
        return "hub_login", message, "set HF_TOKEN in .env to a token that may read it"
    if status == 401:
        return "hub_token", f"{hub} refuses the token for {repository}", "set HF_TOKEN in .env to a valid token"
    if status == 403:
        hint = f"open {hub}/{repository} in a browser, accept its terms, and set HF_TOKEN in .env to that account's"
        return "hub_gated", f"{repository} is gated, and we may not read it", hint
    if status == 404:
        hint = "look at its name in the recipe; for a mirror that lacks it set HF_ENDPOINT=" + DEFAULT_ENDPOINT
        return "hub_missing", f"{hub} has no repository {repository}", hint
    if status == 429:
        hint = "wait some minutes; HF_TOKEN in .env raises the limit"
        return "hub_limit", f"{hub} limits our requests (429) for {repository}", hint
    return "hub_failed", f"{hub} answers {status} for {repository}", "wait a minute, then run the same command again"


def hub_unreachable(settings: Settings, repository: str, details: str) -> SparkserveError:
    """Say that the hub gave no answer at all."""
    hint = "look at the network of this machine; HF_ENDPOINT in .env names another hub or mirror"
    message = f"cannot reach {settings.hf_endpoint} for {repository}"
    return SparkserveError("source_unreachable", message, hint, details=details)
