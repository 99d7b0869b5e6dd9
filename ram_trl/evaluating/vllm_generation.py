"""Completions by vLLM, which needs a model directory: what is not on disk is written for as long as it is needed."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ..errors import ConfigError
from .tasks import RewardTask


__all__ = ["VllmGenerator", "check_vllm", "vllm_generator"]


def check_vllm() -> None:
    """Refuse to begin without vLLM.

    Raises:
        ConfigError: if it cannot be imported.
    """
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"backend='vllm', but vLLM cannot be imported ({error}): install it, or leave --backend out"
        ) from error


class VllmGenerator:
    """Generates with vLLM. It schedules on its own, so all prompts are one batch.

    Args:
        directory (`Path`):
            Model directory.
        dtype (`str`):
            Dtype in memory.
        num_gpus (`int`):
            GPUs that share the model.
    """

    batch_size = 1 << 40
    # vLLM itself refuses what is longer than the model can read
    max_length = None

    def __init__(self, directory: Path, dtype: str, num_gpus: int):
        from vllm import LLM

        self._engine = LLM(model=str(directory), dtype=dtype, tensor_parallel_size=num_gpus)
        self.tokenizer = self._engine.get_tokenizer()

    def generate(self, prompts: Sequence[list[int]], seeds: Sequence[int], task: RewardTask) -> list[list[int]]:
        """Complete prompts: see [`~ram_trl.evaluating.generation.TransformersGenerator`]."""
        from vllm import SamplingParams

        settings = [
            SamplingParams(
                temperature=task.temperature,
                top_p=task.top_p,
                top_k=task.top_k or -1,
                max_tokens=task.max_new_tokens,
                repetition_penalty=1.0,
                seed=seed,
            )
            for seed in seeds
        ]
        outputs = self._engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], settings)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """Give the memory of the GPUs back."""
        del self._engine
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def vllm_generator(directory: Path, dtype: str, num_gpus: int) -> Iterator[VllmGenerator]:
    """A generator for as long as the context lasts."""
    generator = VllmGenerator(directory, dtype, num_gpus)
    try:
        yield generator
    finally:
        generator.close()
