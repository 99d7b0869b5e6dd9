"""Registries in repositories of the Hugging Face Hub: a private model repository, one commit for what is pushed."""

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_url
from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from ..errors import AgentNotFoundError, ConfigError, StorageError
from ..version import __version__
from .remote import Bundle, RemoteChangedError, hide_secrets, reaching


__all__ = ["HubRemote"]
logger = logging.getLogger(__name__)

_URL = re.compile(
    r"hf://(?:models/)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/pr/[0-9]+|[^/@\s]+))?(?P<folder>(?:/[\w.-]+)*)/?"
)
# What one request asks for: gateways have limits.
_REQUEST_BYTES = 1 << 32
_PIECE_BYTES = 1 << 20
_TRIES = 3


class HubRemote:
    """A registry in a model repository of the Hub.

    What is read is read from the one commit that was the newest when the files were listed; what is added is one
    commit on top of it. Large files travel before that commit; those that the Hub has are not sent again.

    Args:
        url (`str`):
            `"hf://USER/REPO"`, `"hf://USER/REPO@REVISION"`, `"hf://USER/REPO/FOLDER"`.
    """

    def __init__(self, url: str):
        self.url = hide_secrets(url)
        match = _URL.fullmatch(url)
        others = ("datasets", "spaces", "kernels", "buckets")
        if match is None or match["repo"].split("/")[0] in others or ".." in url:
            raise ConfigError(f"{self.url} names no model repository: write hf://USER/REPO or hf://USER/REPO@REVISION")
        self._repo, self._revision = match["repo"], match["revision"] or "main"
        self._root = f"{match['folder'].strip('/')}/".lstrip("/")
        self._api = HfApi(library_name="ram_trl", library_version=__version__)
        self._commit = self._revision

    def list_files(self) -> dict[str, int]:
        with self._reaching("reading it"):
            self._commit = self._api.model_info(
                self._repo, revision=self._revision, timeout=HF_HUB_DOWNLOAD_TIMEOUT
            ).sha
            files = {}
            for top in ("agents", "fisher"):
                try:
                    tree = self._api.list_repo_tree(
                        self._repo, f"{self._root}{top}", recursive=True, revision=self._commit
                    )
                    files |= {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
                except EntryNotFoundError:
                    continue
        # what is outside keeps its name, and is refused by the catalogue
        return {path.removeprefix(self._root): size for path, size in files.items()}

    def stream(self, path: str, start: int, stop: int) -> Iterator[bytes]:
        url = hf_hub_url(self._repo, f"{self._root}{path}", revision=self._commit)
        failures = 0
        while start < stop:
            begun, end = start, min(start + _REQUEST_BYTES, stop)
            try:
                with self._reaching(f"reading {path}"):
                    # compressed on the way, it could not be counted
                    asked = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
                    headers = {**build_hf_headers(library_name="ram_trl", library_version=__version__), **asked}
                    # a connection that fails is this function's affair, which knows how far it got
                    options = {"headers": headers, "timeout": HF_HUB_DOWNLOAD_TIMEOUT, "retry_on_exceptions": ()}
                    with http_stream_backoff("GET", url, **options) as response:
                        hf_raise_for_status(response)
                        if response.status_code != 206 and start:
                            raise StorageError(
                                f"{self.url}: the server sends no parts of files: pull again from the start"
                            )
                        for piece in response.iter_bytes(_PIECE_BYTES):
                            piece = piece[: end - start]
                            start += len(piece)
                            yield piece
                            if start == end:
                                break
            except StorageError as error:
                failures = 0 if start > begun else failures + 1
                if failures == _TRIES or not _is_broken_off(error):
                    raise
                time.sleep(failures)
            else:
                if start == begun:
                    return

    def prepare(self, private: bool) -> None:
        with self._reaching("making it"):
            try:
                is_private = self._api.model_info(self._repo, timeout=HF_HUB_DOWNLOAD_TIMEOUT).private
                if private and is_private is False:
                    logger.warning("%s is public: everybody can read what is pushed there", self.url)
            except RepositoryNotFoundError:
                self._api.create_repo(self._repo, private=private)

    def add(self, bundles: Sequence[Bundle], labels: Mapping[str, bytes], advance: Callable[[int], None]) -> None:
        files = [(f"{b.folder}/{name}", str(b.path / name)) for b in bundles for name in b.names]
        operations = [CommitOperationAdd(f"{self._root}{path}", file) for path, file in [*files, *labels.items()]]
        versions = ", ".join(b.folder.removeprefix("agents/") for b in bundles if b.folder.startswith("agents/"))
        try:
            with self._reaching("writing to it"):
                self._api.create_commit(
                    self._repo,
                    operations,
                    commit_message=f"Push {versions or 'labels'} with ram_trl {__version__}",
                    revision=self._revision,
                    parent_commit=self._commit,
                )
        except StorageError as error:
            response = getattr(error.__cause__, "response", None)
            if response is not None and response.status_code in (409, 412):
                raise RemoteChangedError(f"{self.url}: somebody else pushes to it too: push again") from error
            raise
        advance(sum(sum(bundle.sizes.values()) for bundle in bundles))

    @contextmanager
    def _reaching(self, doing: str) -> Iterator[None]:
        """Turn what the Hub's library raises into one line that names the cure."""
        login = "hf auth login, or set HF_TOKEN"
        try:
            with reaching(self.url, doing, "check the network, and HF_ENDPOINT if it is set"):
                yield
        except StorageError as error:
            cause = error.__cause__
            if isinstance(cause, OfflineModeIsEnabled):
                raise StorageError(f"{self.url}: HF_HUB_OFFLINE forbids to reach the Hub: unset it") from cause
            if isinstance(cause, HFValidationError):
                raise ConfigError(f"{self.url} names no repository: write hf://USER/REPO") from cause
            if isinstance(cause, RevisionNotFoundError):
                raise AgentNotFoundError(f"{self.url}: there is no revision {self._revision}: name another") from cause
            if isinstance(cause, GatedRepoError):
                raise StorageError(f"{self.url} is gated: ask for access on its page, then {login}") from cause
            if isinstance(cause, RepositoryNotFoundError):
                raise AgentNotFoundError(
                    f"{self.url}: there is no such repository, or none that you may see: check its name, then {login}"
                ) from cause
            if isinstance(cause, HfHubHTTPError):
                status = cause.response.status_code
                if status == 401:
                    raise StorageError(f"{self.url}: the Hub refuses your token, or got none: {login}") from cause
                if status == 403:
                    raise StorageError(
                        f"{self.url}: {doing} is not permitted: use a token with write access to it ({login})"
                    ) from cause
                said = hide_secrets(" ".join(f"{status} {cause.server_message or ''}".split())[:200])
                raise StorageError(f"{self.url}: {doing} failed, the Hub answered {said}: try again later") from cause
            raise


def _is_broken_off(error: StorageError) -> bool:
    """Whether the connection failed, which another try may mend, and not the Hub refused."""
    return isinstance(error.__cause__, HTTPError) and not isinstance(error.__cause__, HfHubHTTPError)
