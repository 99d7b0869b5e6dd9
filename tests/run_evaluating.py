"""Reward functions of the tests, as a user's module: `run_evaluating:letters`."""

import asyncio
import functools
import json
import os
import signal
import sys


CALLS = []


def result_of(output_dir, row, task):
    """What an evaluation keeps of a row and task: the path of the file, and what is in it."""
    for path in sorted(output_dir.glob("results/*.json")):
        content = json.loads(path.read_text())
        if (content["row"], content["task"]) == (row, task):
            return path, content
    raise KeyError(row, task)


def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def letters(completions, **kwargs):
    """Share of the first letters of the alphabet."""
    return [sum(c < "i" for c in text_of(completion)) / 8 for completion in completions]


def digits(prompts, completions, completion_ids, answer, **kwargs):
    """Length in tokens, for the prompts whose answer is even."""
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer)
    kwargs["log_metric"]("seen", 1.0)
    assert kwargs["trainer_state"].global_step == 0
    return [len(ids) if int(a) % 2 == 0 else None for ids, a in zip(completion_ids, answer, strict=True)]


async def later(completions, **kwargs):
    return letters(completions)


class Judge:
    """A client that belongs to the event loop of its first call, as those of HTTP libraries do."""

    def __init__(self):
        self.loop = None

    async def __call__(self, completions, **kwargs):
        loop = asyncio.get_running_loop()
        self.loop = self.loop or loop
        if loop is not self.loop:
            raise RuntimeError("Event loop is closed")
        await asyncio.sleep(0)
        return letters(completions)


judge = Judge()
twice = functools.partial(letters, unused=2)
TOLD = asyncio.Queue()


async def waits(completions, **kwargs):
    """Ends only if `tells` runs meanwhile."""
    await asyncio.wait_for(TOLD.get(), 20)
    return letters(completions)


async def tells(completions, **kwargs):
    await TOLD.put("go on")
    return letters(completions)


def nan(completions, **kwargs):
    return [float("nan")] * len(completions)


def short(completions, **kwargs):
    return [1.0]


def words(completions, **kwargs):
    return ["good"] * len(completions)


def huge(completions, **kwargs):
    return [1e200] * len(completions)


def by_name(completions, **kwargs):
    return dict.fromkeys(map(str, range(len(completions))), 1.0)


def leaves(completions, **kwargs):
    sys.exit(0)


def takes_away(prompts, **kwargs):
    prompts.pop()
    return [1.0] * len(prompts)


def raises(completions, **kwargs):
    raise RuntimeError("no connection\nto the judge")


def raises_on_rank_1(completions, **kwargs):
    if os.environ.get("RANK") == "1":
        raise RuntimeError("no connection")
    return letters(completions)


def breaks_restoring_on_rank_1(completions, **kwargs):
    """From now on rank 1 finds the base's files changed whenever it looks."""
    if os.environ.get("RANK") == "1":
        from ram_trl.evaluating import in_place

        in_place.digest_piece = lambda piece: os.urandom(8)
    return letters(completions)


def takes_all_memory_of_rank_1(completions, **kwargs):
    """From now on rank 1 runs out of memory when it is to become a merge."""
    if os.environ.get("RANK") == "1":
        from ram_trl.evaluating import rows

        rows.apply_merge = refuse_memory
    return letters(completions)


def refuse_memory(*_, **__):
    raise MemoryError("no room")


def letters_until_killed(completions, **kwargs):
    """Kills the process at a call of its own number, if the environment names one."""
    CALLS.append(1)
    if len(CALLS) == int(os.environ.get("KILL_AT_CALL", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    return letters(completions)
