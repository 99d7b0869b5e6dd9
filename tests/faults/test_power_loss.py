"""Promise 2: after a power loss every acknowledged version is there and valid, and no torn one is in sight.

The disk is an image with ext4 in it. Its shutdown ioctl stops it without writing anything more, as a power loss does;
what was only in memory is gone when it is mounted again.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import Forks


# The journal is written every second, so that much of what was not flushed is half there.
OPTIONS = ["-o", "loop,commit=1"]


@pytest.fixture
def disk(forks: Forks, tmp_path) -> Iterator[tuple[Path, list[str]]]:
    """A disk in a file, where it is mounted and how."""
    if subprocess.run(["mkfs.ext4", "-V"], capture_output=True).returncode:
        pytest.skip("mkfs.ext4 is not installed")
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(1 << 28)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    options = [*OPTIONS, str(image)]
    with forks.mounted(tmp_path / "disk", *options) as place:
        yield place, options


def lose_power(forks: Forks, disk, zoo, chance, points: int, **options) -> tuple[int, int, int]:
    """Snapshots until the power fails, so many times: versions acknowledged, of them lost, and torn ones in sight."""
    base, (place, how) = zoo.base("qwen2_untied"), disk
    acknowledged = lost = torn = 0
    for point in range(points):
        # a new registry, so that its own directories have to last too
        registry = str(place / f"registry-{point}")
        job = {"registry": registry, "agent": "math", "model": str(zoo.agent(base, seed=1)), "base": str(base)}
        job |= {"times": 100_000, "via": chance.choice(["checkpoint", "live"]), **options}
        outcome = forks.run("snapshots", job, kill_after=chance.uniform(0, 1.5), shutdown=str(place))
        # power comes back
        forks.unmount(place)
        forks.mount(place, *how)
        seen = forks.result("examined", {"registry": registry, "agent": "math"})
        acknowledged += len(outcome["acknowledged"])
        lost += len(set(map(str, outcome["acknowledged"])) - set(seen["valid"]))
        torn += sum(valid is not True for valid in seen["valid"].values())
        # room for the next
        forks.result("command", {"words": ["rm", "-r", "-f", registry]})
    return acknowledged, lost, torn


@pytest.mark.parametrize("points", [3, pytest.param(50, marks=[pytest.mark.faults, pytest.mark.timeout(3600)])])
def test_power_losses(forks: Forks, disk, zoo, chance, points):
    acknowledged, lost, torn = lose_power(forks, disk, zoo, chance, points)
    print(f"{points} power losses: {acknowledged} versions acknowledged, {lost} lost, {torn} torn")
    assert acknowledged > 0 and (lost, torn) == (0, 0)


@pytest.mark.faults
def test_the_disk_loses_what_was_not_flushed(forks: Forks, disk, zoo, chance):
    acknowledged, lost, torn = lose_power(forks, disk, zoo, chance, 10, without_fsync=True)
    print(f"without fsync, 10 power losses: {acknowledged} versions acknowledged, {lost} lost, {torn} torn")
    assert lost + torn > 0
