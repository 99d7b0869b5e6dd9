"""Promise 1: a snapshot that is killed shows nothing partial, and costs no version that was acknowledged."""

import time
from collections import Counter
from pathlib import Path

import pytest
from forks import Forks, calls_of, has_strace


CALLS = "write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,mkdir,mkdirat,chmod,fchmodat,openat,unlink,rmdir"
# A call that comes once a snapshot, or a few times, and those that come once a tensor or more.
FEW = {"fsync", "rename", "mkdir", "chmod"}


class Victim:
    """A registry in which snapshots are killed."""

    def __init__(self, forks: Forks, registry: Path, model: Path, base: Path, via: str):
        self.forks, self.registry = forks, registry
        self.acknowledged: set[int] = set()
        self.seen = 0
        self.job = {"registry": str(registry), "agent": "math", "model": str(model), "base": str(base), "via": via}

    def check(self, outcome: dict) -> dict:
        """Nothing partial is in sight, and what was acknowledged is there; what was looked at before stays so."""
        look = {"registry": str(self.registry), "agent": "math", "above": self.seen}
        found = self.forks.result("examined", look)
        assert all(valid is True for valid in found["valid"].values()), found
        assert set(map(str, outcome["acknowledged"])) <= set(found["valid"])
        self.acknowledged |= set(outcome["acknowledged"])
        self.seen = max(map(int, found["valid"]), default=self.seen)
        return found

    def check_next(self) -> None:
        """The next snapshot works, gc removes what the killed ones left, and then all that was ever told is there."""
        outcome = self.forks.run("snapshots", self.job)
        assert outcome["status"] == 0 and "error" not in outcome, outcome
        assert outcome["acknowledged"] == [1 + self.seen]
        self.check(outcome)
        assert self.forks.result("collected", {"registry": str(self.registry)}) == []
        found = self.forks.result("examined", {"registry": str(self.registry), "agent": "math"})
        assert set(found["valid"].values()) == {True} and self.acknowledged <= set(map(int, found["valid"]))
        print(f"{len(found['valid'])} versions in sight, {len(self.acknowledged)} acknowledged, all valid")


@pytest.mark.parametrize("via", ["checkpoint", "live"])
@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=[pytest.mark.faults, pytest.mark.timeout(3600)])])
def test_kills_at_random_moments(forks, model, base, tmp_path, chance, kills, via):
    victim, left, during = Victim(forks, tmp_path / "registry", model, base, via), 0, 0
    victim.check(forks.run("snapshots", victim.job))
    forks.start("snapshots", {**victim.job, "times": 3})
    started = time.perf_counter()
    outcome = forks.finish()
    length = (time.perf_counter() - started) / 3
    victim.check(outcome)
    assert victim.seen == 4
    for _ in range(kills):
        outcome = forks.run("snapshots", {**victim.job, "times": 1000}, kill_after=chance.uniform(0, 2 * length))
        assert outcome["status"] == -9 and "error" not in outcome
        found = len(victim.check(outcome)["left"])
        during, left = during + (found > left), found
    print(f"{kills} kills within {2 * length:.3f} s, {during} of them while a snapshot was staged")
    # else nothing was tested
    assert during > kills / 4
    victim.check_next()


@pytest.mark.parametrize("via", ["checkpoint", "live"])
@pytest.mark.parametrize("how", ["some", pytest.param("all", marks=[pytest.mark.faults, pytest.mark.timeout(3600)])])
def test_a_kill_at_every_system_call(forks, model, base, tmp_path, chance, how, via):
    has_strace()
    victim = Victim(forks, tmp_path / "registry", model, base, via)
    victim.check(forks.run("snapshots", victim.job))
    assert victim.seen == 1
    outcome, lines = forks.traced(tmp_path, ["-e", f"trace={CALLS}"], "snapshots", victim.job)
    victim.check(outcome)
    assert victim.seen == 2
    points = calls_of(lines)
    calls = Counter(call for call, _ in points)
    assert calls["fsync"] >= 5 and calls["rename"] == 1 and calls["mkdir"] >= 1 and calls["write"] >= 10
    if how == "some":
        points = chance.sample([point for point in points if point[0] in FEW], 6) + chance.sample(points, 2)
    print(f"{len(points)} points: {dict(calls)}")
    for call, number in points:
        options = ["-e", f"trace={CALLS}", "-e", f"inject={call}:signal=SIGKILL:when={number}"]
        outcome, lines = forks.traced(tmp_path, options, "snapshots", victim.job)
        assert outcome["status"] == -9, (call, number, outcome)
        victim.check(outcome)
    victim.check_next()
