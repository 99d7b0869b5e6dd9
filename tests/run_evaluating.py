"""Reward functions of the tests, as a user's module: `run_evaluating:letters`."""

import os
import signal


CALLS = []


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


def nan(completions, **kwargs):
    return [float("nan")] * len(completions)


def short(completions, **kwargs):
    return [1.0]


def words(completions, **kwargs):
    return ["good"] * len(completions)


def raises(completions, **kwargs):
    raise RuntimeError("no connection\nto the judge")


def raises_on_rank_1(completions, **kwargs):
    if os.environ.get("RANK") == "1":
        raise RuntimeError("no connection")
    return letters(completions)


def letters_until_killed(completions, **kwargs):
    """Kills the process at a call of its own number, if the environment names one."""
    CALLS.append(1)
    if len(CALLS) == int(os.environ.get("KILL_AT_CALL", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    return letters(completions)
