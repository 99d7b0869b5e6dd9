"""What the tests of sharing share: a `ram-trl` in another process, an S3 server, agents of any size."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np

from ram_trl.storage.manifest import BaseRecord, Manifest, SnapshotRecord


RUN_SHARING = str(Path(__file__).with_name("run_sharing.py"))


class CommandLine:
    """`ram-trl` in a process of its own, which is told where the Hub and S3 are."""

    def __init__(self, environment):
        self._environment = {**os.environ, **environment}
        self._process = subprocess.Popen(
            [sys.executable, RUN_SHARING],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __call__(self, *words, **environment):
        """Exit code, stdout, stderr without progress bars."""
        request = {"words": [str(word) for word in words], "environment": environment}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        lines = [
            line
            for line in re.split(r"[\r\n]+", answer["err"])
            if line.strip() and not re.search(r"%\||\dit \[", line)
        ]
        return answer["code"], answer["out"], "\n".join(lines)

    def start(self, *words, **environment):
        """The same in a process that can be killed."""
        command = [sys.executable, "-m", "ram_trl", *map(str, words)]
        environment = {**self._environment, **environment}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *command, **environment):
        """Another program, to its end."""
        environment = {**self._environment, **environment}
        command = [str(word) for word in command]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)


@contextlib.contextmanager
def s3_server(folder):
    """An S3 server on this machine with an empty bucket "agents"; its address, and the file it logs requests to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address, log = f"http://127.0.0.1:{port}", folder / "s3.log"
    with open(log, "w") as file:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    urllib.request.urlopen(f"{address}/moto-api/", timeout=5).close()
                    break
                except OSError:
                    assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                    time.sleep(0.05)
            urllib.request.urlopen(urllib.request.Request(f"{address}/agents", method="PUT")).close()
            yield address, log
        finally:
            server.terminate()
            server.wait(30)


def add_agent(registry, name, sizes, seed=0):
    """Register files of random bytes as an agent: what travels is not looked into. `sizes`: bytes by file name."""
    generator = np.random.default_rng(seed)
    manifest = Manifest(
        agent=name,
        kind="full",
        created="2026-01-01T00:00:00+00:00",
        ram_trl_version="0",
        base_model=BaseRecord(name="base", digest="0" * 64, total_parameters=1),
        snapshot=SnapshotRecord(dtype="bfloat16", changed=1),
        training={"seed": seed},
    )
    with registry.stage(name) as staged:
        for file, size in sizes.items():
            (staged / file).write_bytes(generator.bytes(size))
        return registry.commit(staged, manifest)


def files_of(registry, spec):
    """Bytes of a version's files."""
    return {file.name: file.read_bytes() for file in sorted(registry.get(spec).path.iterdir())}


def visible(path):
    """Everything in a registry that is not hidden."""
    found = (file.relative_to(path) for file in Path(path).rglob("*") if file.is_file())
    return sorted(str(file) for file in found if not any(part.startswith(".") for part in file.parts))
