"""Signatures of agents by keys in files: what they find, and what digests alone do not."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from models import Zoo


pytest.importorskip("model_signing", reason="pip install ram_trl[sign]")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from ram_trl import AgentRegistry, register_agent
from ram_trl.cli import main
from ram_trl.errors import ConfigError, CorruptedFileError, RamTrlError
from ram_trl.lifecycle.signing import sign_agent, signature_path, verify_signatures
from ram_trl.storage.manifest import _seal


def write_keys(folder: Path, name: str, private, encryption=None) -> tuple[Path, Path]:
    pem = serialization.Encoding.PEM
    encryption = encryption or serialization.NoEncryption()
    secret = private.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption)
    public = private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pem").write_bytes(secret)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / f"{name}.pem", folder / f"{name}.pub"


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("keys")
    names = ("mine", "other")
    return {name: write_keys(folder, name, ec.generate_private_key(ec.SECP256R1())) for name in names}


@pytest.fixture
def registry(zoo: Zoo, tmp_path) -> AgentRegistry:
    """math@v1 and math@v2."""
    base = zoo.base("llama")
    registry = AgentRegistry(tmp_path / "registry")
    for seed in (1, 2):
        register_agent(registry, "math", str(zoo.agent(base, seed)), base_model=str(base))
    return registry


def problems(registry: AgentRegistry, key: Path, *arguments) -> list[str | None]:
    return [verdict.problem for verdict in verify_signatures(registry, key, *arguments)]


def test_a_signature_is_known_by_its_key(registry, keys):
    (private, public), (_, other) = keys["mine"], keys["other"]
    assert problems(registry, public, "math") == ["it is not signed (ram-trl sign)"] * 2
    assert str(sign_agent(registry, "math@v1", private)) == "math@v1"
    assert problems(registry, public, "math@v1") == [None]
    assert problems(registry, public, None, True) == [None, "it is not signed (ram-trl sign)"]
    assert problems(registry, public) == ["it is not signed (ram-trl sign)"]
    [problem] = problems(registry, other, "math@v1")
    assert "is not a signature of it by this key" in problem
    # nothing else has changed
    registry.get("math@v1").verify()
    assert registry.versions("math") == [1, 2]


def test_what_digests_do_not_find_the_signature_finds(registry, keys):
    private, public = keys["mine"]
    agent = sign_agent(registry, "math@v2", private)
    # an attacker puts other weights in place, with digests to match
    content = json.loads((registry.get("math@v1").path / "manifest.json").read_text())
    shutil.copytree(registry.get("math@v1").path, agent.path, dirs_exist_ok=True)
    registry.get("math@v2").verify()
    assert "Hash mismatch" in problems(registry, public, "math@v2")[0]
    del content["digest"]
    (agent.path / "manifest.json").write_text(json.dumps(_seal({**content, "created": "2020-01-01T00:00:00+00:00"})))
    registry.get("math@v2").verify()
    assert "is not a signature of it" in problems(registry, public, "math@v2")[0]


def test_a_signature_of_something_else_is_none(registry, keys, tmp_path):
    from model_signing import hashing, signing

    private, public = keys["mine"]
    agent = sign_agent(registry, "math@v1", private)
    intact = signature_path(agent).read_bytes()
    config = signing.Config().use_elliptic_key_signer(private_key=private)
    (tmp_path / "nothing").mkdir()
    everything_ignored = hashing.Config().set_ignored_paths(paths=["manifest.json", "tensors.json", "."])
    for model, how in ((tmp_path / "nothing", None), (agent.path, None), (agent.path, everything_ignored)):
        config.set_hashing_config(how or hashing.Config()).sign(model, signature_path(agent))
        assert problems(registry, public, "math@v1") != [None]
    bundle = json.loads(intact)
    for damaged in (
        *(b"", b"{}", b"[]", b"\xff", intact[:-10], b"[" * 100_000, bytes(2_000_000)),
        json.dumps({**bundle, "dsseEnvelope": {**bundle["dsseEnvelope"], "signatures": []}}).encode(),
        json.dumps({**bundle, "verificationMaterial": {}}).encode(),
        json.dumps({**bundle, "dsse_envelope": bundle["dsseEnvelope"]}).encode(),
        intact[:-1] + b', "dsseEnvelope": {}}',
    ):
        signature_path(agent).write_bytes(damaged)
        assert problems(registry, public, "math@v1") != [None]
    signature_path(agent).unlink()
    signature_path(agent).symlink_to(tmp_path / "elsewhere.sig")
    (tmp_path / "elsewhere.sig").write_bytes(intact)
    assert problems(registry, public, "math@v1") != [None]
    signature_path(agent).unlink()
    os.mkfifo(signature_path(agent))
    assert problems(registry, public, "math@v1") != [None]


def test_a_signature_goes_where_the_version_goes(registry, keys, tmp_path):
    private, public = keys["mine"]
    sign_agent(registry, "math@v1", private)
    moved = AgentRegistry(shutil.copytree(registry.path, tmp_path / "moved"))
    assert problems(moved, public, "math@v1") == [None]
    moved.remove("math@v1")
    moved.recover("math@v1")
    assert problems(moved, public, "math@v1") == [None]


def test_what_is_damaged_is_not_signed(registry, keys):
    agent = registry.get("math@v1")
    weights = agent.path / "delta.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CorruptedFileError):
        sign_agent(registry, "math@v1", keys["mine"][0])
    assert not signature_path(agent).exists()


def test_what_is_no_key_is_refused(registry, keys, tmp_path):
    private, public = keys["mine"]
    (tmp_path / "empty").write_text("")
    password = serialization.BestAvailableEncryption(b"secret")
    encrypted, _ = write_keys(tmp_path, "encrypted", ec.generate_private_key(ec.SECP256R1()), password)
    other = write_keys(tmp_path, "rsa", rsa.generate_private_key(public_exponent=65537, key_size=2048))
    curve = write_keys(tmp_path, "curve", ec.generate_private_key(ec.SECP256K1()))
    for key in (tmp_path / "empty", public, encrypted, other[0], curve[0]):
        with pytest.raises(ConfigError, match="is not a private key"):
            sign_agent(registry, "math", key)
    for key in (tmp_path / "empty", private, other[1], curve[1]):
        with pytest.raises(ConfigError, match="is not a public key"):
            verify_signatures(registry, key)
    for key in (tmp_path, tmp_path / "nowhere", "/dev/zero"):
        with pytest.raises(RamTrlError):
            sign_agent(registry, "math", key)
        with pytest.raises(RamTrlError):
            verify_signatures(registry, key)
    assert not list(registry.path.rglob("*.sig")) and not list(registry.path.rglob(".tmp-*"))


def test_the_command_line_signs_and_verifies(registry, keys, capsys):
    private, public = keys["mine"]
    words = ["--registry", str(registry.path), "--agent", "math@v1"]
    main(["sign", *words, "--private_key", str(private)])
    assert capsys.readouterr().out == f"math@v1 is signed: {registry.get('math@v1').path}.sig\n"
    main(["verify", *words, "--public_key", str(public)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "note    signature of agent math@v1: by this key" and lines[-1] == "1 intact, 0 failed"
    with pytest.raises(SystemExit, match="1"):
        main(["verify", *words, "--public_key", str(keys["other"][1])])
    assert capsys.readouterr().out.startswith("FAILED  signature of agent math@v1")
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "--registry", str(registry.path), "--generalist", "g", "--public_key", str(public)])
    assert "--public_key is for agents" in capsys.readouterr().err


def test_without_the_library_a_line_says_what_to_install(registry, keys, monkeypatch):
    for name in list(sys.modules):
        if name.startswith("model_signing"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(ConfigError, match=r"pip install ram_trl\[sign\]"):
        sign_agent(registry, "math", keys["mine"][0])
