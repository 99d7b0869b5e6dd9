"""
Runs one command and writes what it took to a file, as JSON: seconds, memory, bytes.

```sh
python -I -S recipes/benchmarks/runner.py RESULT.json LOG COMMAND [ARGUMENT ...]
```

A program of its own because it has to be small: on Linux a process inherits the peak memory of the one that starts it.
"""

import json
import os
import sys
import time


def transferred() -> dict[str, int]:
    """Bytes that this process and those that it has waited for have read and written, by system calls."""
    with open("/proc/self/io") as counters:
        return {name: int(value) for name, value in (line.split(": ") for line in counters)}


def main() -> None:
    result, log, *command = sys.argv[1:]
    # Where memory runs out, the kernel is to end the command and nothing else.
    with open("/proc/self/oom_score_adj", "w") as preference:
        preference.write("1000")
    # What was written before is not to slow this command down.
    os.sync()
    output = [
        (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    before, started = transferred(), time.perf_counter()
    process = os.posix_spawnp(command[0], command, os.environ, file_actions=output)
    _, status, usage = os.wait4(process, 0)
    seconds, after = time.perf_counter() - started, transferred()
    measured = {
        "status": os.waitstatus_to_exitcode(status),
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
        "read_bytes": after["rchar"] - before["rchar"],
        "written_bytes": after["wchar"] - before["wchar"],
    }
    with open(result, "w") as file:
        json.dump(measured, file)


if __name__ == "__main__":
    main()
