"""Signatures: whom a version comes from, which digests cannot tell.

Who can change a registry can write new digests too: an unsigned digest finds damage, not an attacker. A signature lies
beside the version that it is of, `agents/math/v000002.sig`. It is a bundle of Sigstore's model-signing over
`manifest.json`, whose digests cover everything else. Keys are files, nothing is asked of a network.
"""

import base64
import hashlib
import json
import os
import stat
import tempfile
import uuid
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RamTrlError
from ..progress import Progress, meter
from ..storage.durable import STAGING_PREFIX, explain_os_errors, sync_dir, sync_file
from ..storage.names import SIGNATURE
from ..storage.registry import AgentRegistry, RegisteredAgent
from ..storage.versions import MANIFEST
from .verify import Verdict


__all__ = ["sign_agent", "signature_path", "verify_signatures"]

# A signature of one file has some 2 kB.
_LARGEST = 1_000_000


def signature_path(agent: RegisteredAgent) -> Path:
    """Where the signature of a version is, if it has one."""
    return agent.path.with_name(agent.path.name + SIGNATURE)


def sign_agent(
    registry: AgentRegistry, spec: str, private_key: str | os.PathLike, progress: Progress | None = None
) -> RegisteredAgent:
    """Verify a version of an agent, and sign it. A signature that it has is replaced.

    Args:
        registry ([`AgentRegistry`]):
            The registry.
        spec (`str`):
            `"math"` (its latest version), `"math@v2"` or `"math@best"`.
        private_key (`str`):
            File with an elliptic curve key (P-256, P-384 or P-521), PEM, without a password.
        progress (`Callable`, *optional*):
            Called with what is being done, the bytes done and the bytes to do.

    Returns:
        [`RegisteredAgent`]: the version that was signed.

    Raises:
        ConfigError: if the key cannot be used, or model-signing is not installed.
        CorruptedFileError: if the version is not what was registered.
    """
    signing, hashing = _library("signing"), _library("hashing")
    _check_file(private_key)
    try:
        config = signing.Config().use_elliptic_key_signer(private_key=private_key)
    # what the libraries below raise is not written down
    except Exception as error:
        raise ConfigError(f"{private_key} is not a private key of an elliptic curve: {_one_line(error)}") from error
    config.set_hashing_config(_how(hashing))
    agent = registry.get(spec)
    agent.verify(meter("verify", sum(file.size for file in agent.manifest.files.values()), progress))
    path = signature_path(agent)
    written = path.with_name(f"{STAGING_PREFIX}{uuid.uuid4().hex}")
    with explain_os_errors(f"signing {agent}"):
        try:
            config.sign(agent.path / MANIFEST, written)
            sync_file(written)
            os.replace(written, path)
        finally:
            written.unlink(missing_ok=True)
        sync_dir(path.parent)
    return agent


def verify_signatures(
    registry: AgentRegistry, public_key: str | os.PathLike, agent: str | None = None, everything: bool = False
) -> list[Verdict]:
    """Whether versions of agents were signed with the other half of a key. Their files are not looked at.

    Args:
        registry ([`AgentRegistry`]):
            The registry.
        public_key (`str`):
            File with the public key, PEM.
        agent (`str`, *optional*):
            `"math"` (all of its versions), `"math@v2"` or `"math@best"`. By default the newest of every agent.
        everything (`bool`, *optional*, defaults to `False`):
            Whether to look at every version of every agent.

    Returns:
        `list[Verdict]`: one for every version; one that is not signed, or with another key, has a problem.

    Raises:
        ConfigError: if the key cannot be used, or model-signing is not installed.
    """
    verifying, hashing = _library("verifying"), _library("hashing")
    _check_file(public_key)
    try:
        verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except Exception as error:
        raise ConfigError(f"{public_key} is not a public key of an elliptic curve: {_one_line(error)}") from error
    if agent is not None and not everything:
        found = [registry.store.find(agent)]
    else:
        found = [(name, registry.versions(name)) for name in registry.names()]
        found = found if everything else [(name, numbers[-1:]) for name, numbers in found]
    verdicts = []
    for name, numbers in found:
        for number in numbers:
            what, problem = f"signature of agent {name}@v{number}", None
            try:
                problem = _problem(registry.get(f"{name}@v{number}"), verifying, hashing, public_key)
            except RamTrlError as error:
                problem = str(error)
            verdicts.append(Verdict(what, problem=problem, notes=() if problem else ("by this key",)))
    return verdicts


def _problem(agent: RegisteredAgent, verifying: Any, hashing: Any, public_key: str | os.PathLike) -> str | None:
    path = signature_path(agent)
    if not os.path.lexists(path):
        return "it is not signed (ram-trl sign)"
    data = _read_small(path)
    if data is None:
        return f"{path} is not a signature"
    # of how to look at files nothing is taken from the signature
    config = verifying.Config().use_elliptic_key_verifier(public_key=public_key).set_hashing_config(_how(hashing))
    try:
        with tempfile.TemporaryDirectory() as folder:
            # a copy, so that what is looked into below is what was verified
            copy = Path(folder, "signature")
            copy.write_bytes(data)
            config.verify(agent.path / MANIFEST, copy)
        signed = _signed(data)
    except Exception as error:
        return f"{path} is not a signature of it by this key: {_one_line(error)}"
    # The library takes from a statement which files to ignore. One that this key made about something else, and that
    # ignores what lies here, would hold of anything.
    if signed != [hashlib.sha256((agent.path / MANIFEST).read_bytes()).hexdigest()]:
        return f"{path} is a signature of something else"
    return None


def _read_small(path: Path) -> bytes | None:
    """Content of a regular file, if it is one and could be a signature."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            found = os.fstat(file.fileno())
            return file.read() if stat.S_ISREG(found.st_mode) and found.st_size <= _LARGEST else None
    except OSError:
        return None


def _signed(data: bytes) -> list[str]:
    """Digests of the files that the statement in a bundle is about.

    Raises:
        ValueError: if it is written in another way than by model-signing, which might be read in two ways.
    """
    bundle = json.loads(data, object_pairs_hook=_once)
    envelope = bundle["dsseEnvelope"]
    if set(bundle) != {"mediaType", "verificationMaterial", "dsseEnvelope"}:
        raise ValueError(f"it has the fields {', '.join(bundle)}")
    if set(envelope) != {"payload", "payloadType", "signatures"} or len(envelope["signatures"]) != 1:
        raise ValueError(f"its envelope has the fields {', '.join(envelope)}")
    statement = json.loads(base64.b64decode(envelope["payload"], validate=True), object_pairs_hook=_once)
    return [resource["digest"] for resource in statement["predicate"]["resources"]]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field is there twice")
    return found


def _how(hashing: Any) -> Any:
    return hashing.Config().use_file_serialization(hashing_algorithm="sha256", max_workers=1)


def _library(module: str) -> Any:
    try:
        import model_signing.hashing
        import model_signing.signing
        import model_signing.verifying
    except ImportError as error:
        raise ConfigError("signatures need model-signing: pip install ram_trl[sign]") from error
    return getattr(model_signing, module)


def _check_file(key: str | os.PathLike) -> None:
    with explain_os_errors(f"reading the key {key}"):
        if not stat.S_ISREG(os.stat(key).st_mode):
            raise ConfigError(f"{key} is not a file with a key")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
