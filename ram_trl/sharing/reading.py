"""A registry elsewhere, to read from: what is needed of it is fetched into a cache, verified, and shown as a registry.

```
CACHE/versions/agents/DIGEST/delta.safetensors              what was fetched of one version
CACHE/views/DIGEST/agents/math/v000002/delta.safetensors    the same file in a registry like any other
```

A view is what a place held when it was asked, with the numbers that versions have there. It is never changed: what a
running merge reads stays as it is. The cache can be removed whenever nothing reads it.
"""

import contextlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from blake3 import blake3

from ..distributed import SINGLE, World
from ..errors import CorruptedFileError, DistributedError
from ..progress import Progress, meter
from ..storage.durable import STAGING_PREFIX, digest_file, explain_os_errors, make_dirs, publish
from ..storage.manifest import FileRecord
from ..storage.names import version_dir_name
from ..storage.registry import AgentRegistry
from ..storage.versions import MANIFEST, verify_files
from .catalogue import Catalogue, Held
from .fetch import check_space, fetch, staging_for
from .fishers import find_fishers, left_out
from .places import is_url, local_path, open_remote
from .remote import Source


__all__ = ["cache_dir", "open_registry"]
logger = logging.getLogger(__name__)


def open_registry(
    place: AgentRegistry | str | os.PathLike,
    agents: Sequence[str] | None = None,
    *,
    weights: bool = True,
    world: World = SINGLE,
    progress: Progress | None = None,
) -> AgentRegistry:
    """A registry to read from, in a directory or elsewhere.

    What is elsewhere is fetched into a cache (`RAM_TRL_CACHE`, by default `~/.cache/ram_trl`) as far as it is needed
    and not there yet, and compared with its manifest. Only one process of a machine fetches.

    Args:
        place ([`AgentRegistry`] or `str`):
            A directory, `"hf://USER/REPO"`, optionally with `@REVISION`, or a URL that fsspec knows.
        agents (`Sequence[str]`, *optional*):
            What is needed: `"math"` (its latest version), `"math@v2"`, `"math@best"`. Default: the latest version of
            every agent; without `weights` all versions.
        weights (`bool`, *optional*, defaults to `True`):
            Whether more than manifests and labels is needed.
        world ([`~ram_trl.distributed.World`], *optional*):
            Processes that open it together.
        progress (`Callable`, *optional*):
            Called with what is done, how many bytes of it, and how many there are.

    Returns:
        [`AgentRegistry`]: the directory itself, or one in the cache that nobody should write to.

    Raises:
        AgentNotFoundError: if there is no such place or agent.
        CorruptedFileError: if something there is not what was registered.
        StorageError: if the place cannot be reached, or the disk is full.
    """
    if not is_url(place):
        return AgentRegistry(place)
    if (folder := local_path(place)) is not None:
        return AgentRegistry(folder)
    views = cache_dir() / "views"

    def look() -> str:
        return _view(open_remote(place), views.parent, agents, weights, progress)

    name = world.run_on_main(look)

    def check() -> None:
        # on another machine the cache is another one
        if not (views / name).is_dir() and look() != name:
            raise DistributedError("the registry changed while it was opened: start again")

    world.run(check)
    return AgentRegistry(views / name)


def cache_dir() -> Path:
    """Where what is read from elsewhere is kept."""
    if chosen := os.environ.get("RAM_TRL_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ram_trl")


def _view(source: Source, cache: Path, agents: Sequence[str] | None, weights: bool, progress: Progress | None) -> str:
    """Make a registry of what a place holds; the name of its directory."""
    catalogue = Catalogue(source)
    chosen = catalogue.choose(agents, "latest" if weights else "all")
    parts = [catalogue.agent(name, number) for name, number in chosen]
    if weights:
        fishers, notes = find_fishers(catalogue, parts)
        parts += fishers.values()
        for spec, lines in notes.items():
            logger.warning("%s: %s", spec, *lines)
    labels = _labels(catalogue, chosen)
    with explain_os_errors(f"writing to the cache {cache}"):
        files = {f"{held.folder}/{MANIFEST}": held.manifest for held in parts}
        stored: dict[str, tuple[Path, FileRecord]] = {}
        if weights:
            places = [(_place(cache, held), held) for held in parts]
            check_space(cache, [(place.parent, held) for place, held in places if not place.is_dir()])
            advance = meter("fetch", sum(held.size for held in parts), progress)
            for held in parts:
                try:
                    place = _store(source, cache, held, advance)
                except CorruptedFileError as error:
                    if held.folder.startswith("agents/"):
                        raise
                    logger.warning("%s: %s", held, left_out(error))
                    del files[f"{held.folder}/{MANIFEST}"]
                    continue
                stored |= {f"{held.folder}/{name}": (place / name, record) for name, record in held.files.items()}
        files |= labels
        listed = json.dumps([weights, sorted((path, blake3(data).hexdigest()) for path, data in files.items())])
        view = cache / "views" / blake3(listed.encode()).hexdigest()
        if view.is_dir() and not _is_whole(view, files, stored):
            shutil.rmtree(view)
        if not view.is_dir():
            _build(view, files, {path: file for path, (file, _) in stored.items()})
    return view.name


def _labels(catalogue: Catalogue, chosen: list[tuple[str, int]]) -> dict[str, bytes]:
    """Files of the aliases and tags of some versions."""
    files = {}
    for name in dict.fromkeys(name for name, _ in chosen):
        for alias, number in catalogue.aliases(name).items():
            if (name, number) in chosen:
                files[f"agents/{name}/aliases/{alias}.json"] = json.dumps({"version": number}).encode()
    for name, number in chosen:
        tags = catalogue.tags(name, number)
        files |= {f"agents/{name}/tags/{version_dir_name(number)}/{tag}": b"" for tag in tags}
    return files


def _place(cache: Path, held: Held) -> Path:
    """Where the files of a version are kept."""
    top = held.folder.partition("/")[0]
    return cache / "versions" / top / blake3(held.manifest).hexdigest()


def _store(source: Source, cache: Path, held: Held, advance: Callable[[int], None]) -> Path:
    """The directory of a version's files, which are those that were registered."""
    place = _place(cache, held)
    with staging_for(place.parent, held) as staged:
        if place.is_dir():
            try:
                verify_files(place, held.files, f"the copy of {held} in the cache", "fetch it again", advance)
                return place
            except CorruptedFileError:
                shutil.rmtree(place)
        fetch(source, held, staged, advance)
        verify_files(staged, held.files, f"{held}, which arrived", "fetch it again")
        # where there are no locks another process may have been here
        with contextlib.suppress(FileExistsError):
            publish(staged, place)
    return place


def _build(view: Path, files: dict[str, bytes], stored: dict[str, Path]) -> None:
    """Lay out a registry of small files and of links to large ones. It appears whole."""
    staged = view.with_name(f"{STAGING_PREFIX}{uuid.uuid4().hex}")
    try:
        make_dirs(staged)
        for path in (*files, *stored):
            (staged / path).parent.mkdir(parents=True, exist_ok=True)
        for path, data in files.items():
            (staged / path).write_bytes(data)
        for path, file in stored.items():
            try:
                os.link(file, staged / path)
            except OSError:
                # a file system without links
                shutil.copyfile(file, staged / path)
        # another process may have made the same
        with contextlib.suppress(OSError):
            os.rename(staged, view)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _is_whole(view: Path, files: dict[str, bytes], stored: dict[str, tuple[Path, FileRecord]]) -> bool:
    """Whether a view has its small files, and of the large ones those that were verified, or equal copies."""
    try:
        return all((view / path).read_bytes() == data for path, data in files.items()) and all(
            os.path.samefile(view / path, file) or digest_file(view / path) == record.blake3
            for path, (file, record) in stored.items()
        )
    except FileNotFoundError:
        return False
