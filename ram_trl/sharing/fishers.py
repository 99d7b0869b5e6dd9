"""Fisher information travels with its version if it is intact. An agent can do without it."""

from collections.abc import Sequence

from ..errors import CorruptedFileError
from ..storage.registry import AgentRegistry
from ..storage.versions import verify_files
from .catalogue import Catalogue, Held


__all__ = ["find_fishers", "left_out", "verified_fishers"]


def left_out(error: CorruptedFileError) -> str:
    """The note about Fisher information that does not travel."""
    return f"its Fisher information stays behind: {error}"


def find_fishers(catalogue: Catalogue, agents: Sequence[Held]) -> tuple[dict[str, Held], dict[str, list[str]]]:
    """What a place has for some versions, by version, and notes about what is damaged; its bytes are not read."""
    found, notes = {}, {}
    for agent in agents:
        try:
            if (fisher := catalogue.fisher(agent)) is not None:
                found[str(agent)] = fisher
        except CorruptedFileError as error:
            notes[str(agent)] = [left_out(error)]
    return found, notes


def verified_fishers(
    registry: AgentRegistry, catalogue: Catalogue, agents: Sequence[Held]
) -> tuple[dict[str, Held], dict[str, list[str]]]:
    """[`find_fishers`] in a registry, compared with the recorded digests."""
    found, notes = find_fishers(catalogue, agents)
    for spec, fisher in list(found.items()):
        path = registry.path / fisher.folder
        try:
            verify_files(path, fisher.files, f"the Fisher of agent {spec}", f"remove {path} and make it again")
        except CorruptedFileError as error:
            del found[spec]
            notes[spec] = [left_out(error)]
    return found, notes
