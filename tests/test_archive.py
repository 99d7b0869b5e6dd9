"""Agents as single files: the same bytes everywhere, what ordinary tools read, and nothing that is not one."""

import bz2
import errno
import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from models import Zoo

from ram_trl import AgentRegistry, merge_agents, register_agent
from ram_trl.cli import main
from ram_trl.errors import (
    ConfigError,
    CorruptedFileError,
    InvalidNameError,
    OutputExistsError,
    RamTrlError,
    StorageError,
    UnsupportedModelError,
)
from ram_trl.lifecycle.archive import _header, export_agent, import_agent
from ram_trl.storage.manifest import _seal


@pytest.fixture(scope="module")
def source(zoo: Zoo) -> AgentRegistry:
    """math@v1 (full) and tool@v1 (LoRA)."""
    base = zoo.base("llama")
    return zoo.registry(base, {"math": zoo.agent(base, seed=1), "tool": zoo.adapter(base)})


@pytest.fixture(scope="module")
def archives(source, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("archives")
    for name in ("math", "tool"):
        export_agent(source, name, folder / f"{name}.tar")
    return {name: folder / f"{name}.tar" for name in ("math", "tool")}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ["math", "tool"])
def test_an_agent_comes_back_byte_for_byte_with_its_number(source, archives, tmp_path, name):
    registry = AgentRegistry(tmp_path / "registry")
    agent, is_new = import_agent(registry, archives[name])
    assert (str(agent), is_new, agent.path.parent.parent.parent) == (f"{name}@v1", True, registry.path)
    assert content(agent.path) == content(source.get(name).path)
    registry.get(name).verify()
    # a second time there is nothing to do
    before = everything(registry.path)
    assert import_agent(registry, archives[name]) == (registry.get(name), False)
    assert everything(registry.path) == before


def test_what_was_imported_merges_like_what_was_registered(source, archives, tmp_path):
    for archive in archives.values():
        import_agent(tmp_path / "registry", archive)
    merge_agents(source, str(tmp_path / "one"))
    merge_agents(tmp_path / "registry", str(tmp_path / "two"))
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()


def test_the_same_version_is_the_same_bytes(source, archives, tmp_path):
    export_agent(source, "math@v1", tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == archives["math"].read_bytes()
    agent, _ = import_agent(tmp_path / "elsewhere", archives["math"])
    os.utime(agent.path / "tensors.json", (1, 1))
    (agent.path / "tensors.json").chmod(0o640)
    export_agent(tmp_path / "elsewhere", "math", tmp_path / "elsewhere.tar")
    assert (tmp_path / "elsewhere.tar").read_bytes() == archives["math"].read_bytes()


@pytest.mark.parametrize("name", ["math", "tool"])
def test_ordinary_tools_read_an_archive(source, archives, tmp_path, name):
    agent = source.get(name)
    with tarfile.open(archives[name], "r:") as archive:
        members = archive.getmembers()
        assert [member.name for member in members] == [
            f"{name}/v000001/{file}" for file in ("manifest.json", *agent.manifest.files)
        ]
        assert {(m.mode, m.uid, m.gid, m.mtime, m.uname, m.isreg()) for m in members} == {(0o644, 0, 0, 0, "", True)}
    subprocess.run(["tar", "-xf", archives[name]], cwd=tmp_path, check=True)
    assert content(tmp_path / name / "v000001") == content(agent.path)


@pytest.mark.parametrize("nbytes", [0, 1, 511, 8**11 - 1, 8**11, 3 * 2**40])
def test_sizes_of_any_number_of_digits_are_read_by_ordinary_tools(tmp_path, nbytes):
    folder, file = "a" * 96 + "/v000001", tmp_path / "large.tar"
    with open(file, "wb") as archive:
        archive.write(_header(folder, "adapter_model.safetensors", nbytes))
        # a hole
        archive.truncate(archive.tell() + nbytes + 512)
    with tarfile.open(file, "r:") as archive:
        assert [(m.name, m.size) for m in archive] == [(f"{folder}/adapter_model.safetensors", nbytes)]
    listed = subprocess.run(["tar", "-tvf", file], capture_output=True, text=True)
    assert f" {nbytes} 1970" in listed.stdout and f" {folder}/adapter_model.safetensors" in listed.stdout


def test_a_number_that_was_used_is_not_used_again(archives, source, zoo, tmp_path):
    registry = AgentRegistry(tmp_path / "registry")
    register_agent(registry, "math", str(zoo.agent(zoo.base("llama"), seed=2)), base_model=str(zoo.base("llama")))
    agent, is_new = import_agent(registry, archives["math"])
    assert (str(agent), is_new) == ("math@v2", True)
    assert content(agent.path) == content(source.get("math").path)


def test_under_another_name_the_manifest_says_so(archives, source, tmp_path):
    registry = AgentRegistry(tmp_path / "registry")
    agent, _ = import_agent(registry, archives["math"], "algebra")
    assert (str(agent), agent.manifest.agent) == ("algebra@v1", "algebra")
    agent.verify()
    assert agent.manifest.files == source.get("math").manifest.files
    assert import_agent(registry, archives["math"], "algebra")[1] is False
    with pytest.raises(InvalidNameError):
        import_agent(registry, archives["math"], "../algebra")
    assert registry.names() == ["algebra"]


def test_a_file_that_is_there_is_not_written_over(source, tmp_path):
    (tmp_path / "math.tar").write_text("mine")
    (tmp_path / "link.tar").symlink_to(tmp_path / "nowhere")
    for name in ("math.tar", "link.tar"):
        with pytest.raises(OutputExistsError, match="choose another --output"):
            export_agent(source, "math", tmp_path / name)
    assert (tmp_path / "math.tar").read_text() == "mine"
    with pytest.raises(ConfigError, match="inside the registry"):
        export_agent(source, "math", source.path / "math.tar")


def test_a_file_that_came_meanwhile_is_not_written_over(source, tmp_path):
    output = tmp_path / "math.tar"
    with pytest.raises(OutputExistsError, match="choose another --output"):
        export_agent(source, "math", output, lambda *step: output.write_text("mine"))
    assert content(tmp_path) == {"math.tar": b"mine"}


def test_a_file_system_without_links_gets_archives_too(source, archives, tmp_path, monkeypatch):
    def link(*paths):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    export_agent(source, "math", tmp_path / "math.tar")
    assert content(tmp_path) == {"math.tar": archives["math"].read_bytes()}


def test_a_damaged_agent_is_not_exported(archives, tmp_path):
    agent, _ = import_agent(tmp_path / "registry", archives["math"])
    weights = agent.path / "delta.safetensors"
    intact = weights.read_bytes()
    for damaged in (intact[:-1], intact + b"\0", intact[:-1] + bytes([intact[-1] ^ 1]), b""):
        weights.write_bytes(damaged)
        with pytest.raises(CorruptedFileError):
            export_agent(tmp_path / "registry", "math", tmp_path / "out" / "math.tar")
        assert not (tmp_path / "out").exists()
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(CorruptedFileError, match="not a regular file"):
        export_agent(tmp_path / "registry", "math", tmp_path / "math.tar")
    assert everything(tmp_path) == {"registry", *(f"registry/{path}" for path in everything(tmp_path / "registry"))}


def test_a_full_disk_leaves_no_part_of_an_archive(source, tmp_path):
    script = (
        "import resource, sys\nfrom ram_trl.lifecycle.archive import export_agent\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "export_agent(sys.argv[1], 'math', sys.argv[2])"
    )
    command = [sys.executable, "-c", script, source.path, tmp_path / "out" / "math.tar"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "StorageError: writing" in result.stderr and "File too large" in result.stderr
    assert everything(tmp_path) == set()


# Hostile archives


def refused(archive: Path, tmp_path: Path, match: str = "", error: type = CorruptedFileError) -> None:
    """An archive is refused with one of our errors, and nothing but the empty registry, if that, is left behind."""
    registry = tmp_path / "registry"
    before = everything(tmp_path)
    with pytest.raises(error, match=match):
        import_agent(registry, archive)
    assert everything(tmp_path) == before


def members_of(archive: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(archive, "r:") as opened:
        return [(member, opened.extractfile(member).read()) for member in opened]


def packed(members, path: Path, **options) -> Path:
    """An archive as Python's own tarfile writes it."""
    with tarfile.open(path, "w", **options) as archive:
        for member, data in members:
            archive.addfile(member, io.BytesIO(data))
    return path


def canonical(folder: str, files: dict[str, bytes], path: Path) -> Path:
    """An archive with any content, in the form that export gives."""
    data = b"".join(_header(folder, name, len(data)) + data + bytes(-len(data) % 512) for name, data in files.items())
    path.write_bytes(data + bytes(-(-(len(data) + 1024) // 10240) * 10240 - len(data)))
    return path


def resealed(archive: Path, change) -> dict[str, bytes]:
    """Files of an archive, with a manifest that was changed and sealed again, as an attacker would."""
    files = {Path(member.name).name: data for member, data in members_of(archive)}
    manifest = json.loads(files["manifest.json"])
    del manifest["digest"]
    change(manifest, files)
    return {**files, "manifest.json": json.dumps(_seal(manifest)).encode()}


def test_the_helpers_make_an_archive_that_is_accepted(archives, tmp_path):
    files = resealed(archives["math"], lambda manifest, files: manifest["training"].update(note="mine"))
    agent, _ = import_agent(tmp_path / "registry", canonical("math/v000001", files, tmp_path / "math.tar"))
    assert agent.manifest.training["note"] == "mine"


def test_every_changed_byte_of_an_archive_is_found(archives, tmp_path):
    intact = archives["math"].read_bytes()
    (tmp_path / "bad.tar").write_bytes(b"")
    places = torch.randint(len(intact), (150,), generator=torch.Generator().manual_seed(0)).tolist()
    headers = [start + at for start in range(0, 4096, 512) for at in (0, 100, 124, 136, 148, 156, 157, 257, 345, 500)]
    for place in [*places, *headers, len(intact) - 1]:
        (tmp_path / "bad.tar").write_bytes(intact[:place] + bytes([intact[place] ^ 1]) + intact[place + 1 :])
        refused(tmp_path / "bad.tar", tmp_path, error=(CorruptedFileError, UnsupportedModelError))


def test_an_archive_that_ends_early_or_goes_on_is_refused(archives, tmp_path):
    intact, bad = archives["math"].read_bytes(), tmp_path / "bad.tar"
    bad.write_bytes(b"")
    for length in (0, 1, 511, 512, 600, 5000, len(intact) // 2, len(intact) - 10240, len(intact) - 1):
        bad.write_bytes(intact[:length])
        refused(bad, tmp_path)
    bad.write_bytes(intact[:-1])
    refused(bad, tmp_path, f"it has {len(intact) - 1:,} of its {len(intact):,} bytes: get it again")
    for more in (b"\0", bytes(10240), intact):
        bad.write_bytes(intact + more)
        refused(bad, tmp_path, "where its files make")


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_other_archives_of_the_same_files_are_refused(archives, tmp_path, format):
    members = members_of(archives["math"])
    for member, _ in members:
        member.pax_headers = {"comment": "x"}
    refused(packed(members, tmp_path / "bad.tar", format=format), tmp_path)


def test_members_that_are_no_files_of_the_agent_are_refused(archives, tmp_path):
    members, bad = members_of(archives["math"]), tmp_path / "bad.tar"
    bad.write_bytes(b"")
    names = ["../../x", "/tmp/x", "math/v000001/../x", "math/v000001/x", "math/v000001/tensors.json", "x\0y", "\u202e"]
    extra = [tarfile.TarInfo(name) for name in names]
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE)
    for kind in (*kinds, tarfile.GNUTYPE_SPARSE, tarfile.CONTTYPE, b"\0", b"Z"):
        member = tarfile.TarInfo("math/v000001/tensors.json")
        member.type, member.linkname = kind, "/etc/passwd"
        extra.append(member)
    for member in extra:
        for at in (0, 1, len(members)):
            refused(packed([*members[:at], (member, b""), *members[at:]], bad), tmp_path)
    for at in range(len(members)):
        # instead of the file, once more, left out, in another order
        refused(packed([*members[:at], (extra[-5], b""), *members[at + 1 :]], bad), tmp_path)
        refused(packed([*members[: at + 1], *members[at:]], bad), tmp_path)
        refused(packed([*members[:at], *members[at + 1 :]], bad), tmp_path)
        refused(packed([*members[at:], *members[:at]] if at else members[::-1], bad), tmp_path)


@pytest.mark.parametrize(
    "pax",
    [
        {"path": "/etc/passwd"},
        {"size": "1"},
        {"linkpath": "/etc/passwd"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "x", "GNU.sparse.realsize": "9" * 18},
        {"hdrcharset": "BINARY"},
    ],
    ids=lambda pax: next(iter(pax)),
)
def test_extended_headers_are_refused(archives, tmp_path, pax):
    for at in (0, 1):
        members = members_of(archives["math"])
        members[at][0].pax_headers = pax
        refused(packed(members, tmp_path / "bad.tar", format=tarfile.PAX_FORMAT), tmp_path)
    refused(packed(members_of(archives["math"]), tmp_path / "bad.tar", pax_headers=pax), tmp_path)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress], ids=["gzip", "bzip2"])
def test_a_compressed_archive_is_not_opened(archives, tmp_path, compress):
    (tmp_path / "bad.tar").write_bytes(compress(archives["math"].read_bytes()))
    refused(tmp_path / "bad.tar", tmp_path, "or is compressed")


def _record(**change):
    return lambda manifest, files: manifest["files"]["tensors.json"].update(change)


def _rename(name: str):
    def rename(manifest, files):
        manifest["files"][name] = manifest["files"].pop("tensors.json")
        files[name] = files.pop("tensors.json")

    return rename


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_record(size=0), "where its files make"),
        (_record(size=10**18), "of its"),
        (_record(size=-1), "size cannot be -1"),
        (_record(size=2**70), "size cannot be"),
        (_record(size=True), "size cannot be"),
        (_record(size=1.5), "size cannot be"),
        (_record(size="1"), "size cannot be"),
        (_record(size=[1]), "size cannot be"),
        (_record(blake3="0" * 64), "is not the file that was registered"),
        (_record(blake3=None), "blake3 cannot be"),
        (_record(more=1), "is not a manifest"),
        (_rename("../../x"), "other files than an agent has"),
        (_rename("/etc/passwd"), "other files than an agent has"),
        (_rename("x.pkl"), "other files than an agent has"),
        (_rename(""), "other files than an agent has"),
        (_rename("x\0y"), "other files than an agent has"),
        (lambda manifest, files: manifest.update(files={}), "other files"),
        (lambda manifest, files: manifest.update(files=[]), "not a manifest"),
        (lambda manifest, files: manifest.update(kind="lora"), "other files"),
        (lambda manifest, files: manifest.update(kind="pickle"), "other files"),
        (lambda manifest, files: manifest.update(kind=["full"]), "kind cannot be"),
        (lambda manifest, files: manifest.update(agent="../x"), "is that of agent"),
        (lambda manifest, files: manifest.update(agent=None), "agent cannot be"),
        (lambda manifest, files: manifest.update(format_version=2), "newer|format version 2"),
    ],
)
def test_a_manifest_that_lies_is_refused(archives, tmp_path, change, match):
    files = resealed(archives["math"], change)
    files = {"manifest.json": files.pop("manifest.json"), **files}
    refused(
        canonical("math/v000001", files, tmp_path / "bad.tar"),
        tmp_path,
        match,
        (CorruptedFileError, UnsupportedModelError),
    )


@pytest.mark.parametrize(
    "folder", ["math/v000000", "math/v1", "math/../x", "../v000001", "/v000001", "math", ".a/v000001"]
)
def test_a_folder_that_is_none_of_a_version_is_refused(archives, tmp_path, folder):
    files = {Path(member.name).name: data for member, data in members_of(archives["math"])}
    refused(canonical(folder, files, tmp_path / "bad.tar"), tmp_path)


def test_a_manifest_that_is_none_is_refused(tmp_path):
    for text in (b"[", b"[]", b"null", b"{}", b"\xff", b"[" * 100_000, b'{"format_version": 1, "digest": 1e999}'):
        refused(canonical("math/v000001", {"manifest.json": text}, tmp_path / "bad.tar"), tmp_path)
        (tmp_path / "bad.tar").unlink()


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", tmp_path, "not a regular file")
    refused(tmp_path, tmp_path, "", RamTrlError)
    refused(Path("/dev/zero"), tmp_path, "not a regular file")
    refused(tmp_path / "nowhere", tmp_path, "No such file", StorageError)


def test_a_manifest_that_claims_too_much_is_not_read(tmp_path):
    with open(tmp_path / "bad.tar", "wb") as file:
        file.write(_header("math/v000001", "manifest.json", 8**11 - 1))
        file.truncate(8**11)
    refused(tmp_path / "bad.tar", tmp_path, "does not begin with")


# Command line


def test_the_command_line_exports_and_imports(source, archives, tmp_path, capsys):
    output, registry = tmp_path / "math.tar", tmp_path / "registry"
    main(["export", "--registry", str(source.path), "--agent", "math", "--output", str(output)])
    assert f"math@v1 exported to {output} (" in capsys.readouterr().out
    assert output.read_bytes() == archives["math"].read_bytes()
    main(["import", str(output), "--registry", str(registry)])
    assert capsys.readouterr().out == f"math@v1 imported from {output}\n"
    main(["import", str(output), "--registry", str(registry)])
    assert capsys.readouterr().out == f"math@v1 is what {output} holds: nothing to do\n"
    main(["import", str(output), "--registry", str(registry), "--agent", "algebra", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert (printed["name"], printed["new"]) == ("algebra", True)
    output.write_bytes(output.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="2"):
        main(["import", str(output), "--registry", str(registry)])
    assert "get it again" in capsys.readouterr().err


def test_nothing_of_an_import_that_is_killed_is_visible(archives, tmp_path):
    script = (
        "import os, signal, sys\nfrom ram_trl import AgentRegistry\n"
        "AgentRegistry.admit = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from ram_trl.lifecycle.archive import import_agent\nimport_agent(sys.argv[1], sys.argv[2])"
    )
    command = [sys.executable, "-c", script, tmp_path / "registry", archives["math"]]
    assert subprocess.run(command).returncode == -9
    registry = AgentRegistry(tmp_path / "registry")
    assert (registry.names(), registry.versions("math")) == ([], [])
    assert import_agent(registry, archives["math"])[1]
