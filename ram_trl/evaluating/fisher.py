"""The diagonal Fisher information of an agent, from a user's examples: the mean square of per-example gradients."""

from collections.abc import Callable, Sequence
from datetime import datetime, timezone

import torch
from torch import Tensor, nn

from ..arithmetic.codec import is_mergeable
from ..distributed import World
from ..errors import UnsupportedModelError
from ..storage.base_model import open_recorded_base
from ..storage.fisher import FISHER, FisherManifest, FisherStore
from ..storage.registry import AgentRegistry, RegisteredAgent
from ..storage.stream_writer import StreamWriter
from ..version import __version__
from .in_place import apply_agent


__all__ = ["IGNORED", "estimate_fisher", "squared_gradients"]

# Label of a token that does not count, as transformers has it.
IGNORED = -100

Example = tuple[list[int], list[int]]


def estimate_fisher(
    registry: AgentRegistry,
    agent: RegisteredAgent,
    model: nn.Module,
    examples: Sequence[Example],
    *,
    base_model: str | None,
    world: World,
    add_up: Callable[[Tensor], Tensor],
) -> str:
    """Estimate the Fisher information of an agent and store it beside it. All ranks call it.

    Args:
        registry ([`AgentRegistry`]):
            The registry.
        agent ([`RegisteredAgent`]):
            The agent.
        model (`nn.Module`):
            The agent's base, a causal language model in float32, on this rank's device; it is the base again
            afterwards.
        examples (`Sequence[tuple[list[int], list[int]]]`):
            Token ids and labels of all examples; the ranks share them out.
        base_model (`str`, *optional*):
            Where the base model's files are now, if not where they were.
        world ([`~ram_trl.distributed.World`]):
            The processes.
        add_up (`Callable[[Tensor], Tensor]`):
            Sum of a tensor over the ranks.

    Returns:
        `str`: the directory that holds it.

    Raises:
        UnsupportedModelError: if parameters of the model have other names or shapes than the base's tensors.
    """
    store = FisherStore(registry)
    base = world.run(lambda: open_recorded_base(agent, base_model))
    records = agent.tensors()
    wanted = {
        info.name: info.shape
        for info in base.tensors.values()
        if records[info.name].tied_to is None and is_mergeable(info.dtype)
    }

    def estimate() -> dict[str, Tensor]:
        store.check_absent(agent)
        found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for name, shape in wanted.items():
            if found.get(name) != shape:
                raise UnsupportedModelError(
                    f"tensor {name!r} of {base.name} is no parameter of the loaded model, which splits or fuses its "
                    "weights: its Fisher information is not supported"
                )
        with apply_agent(model, registry, str(agent), base_model=base_model):
            return squared_gradients(model, examples[world.rank :: world.size])

    sums = world.run(estimate)
    means = {name: add_up(sums[name]).cpu() / len(examples) for name in wanted}

    def write() -> str:
        with store.stage(agent) as staged:
            writer = StreamWriter(staged / FISHER, wanted, {"format": "pt"})
            for name, mean in means.items():
                writer.write(name, mean.to(torch.bfloat16))
            writer.close()
            manifest = FisherManifest(
                agent=str(agent),
                agent_digest=agent.manifest.to_dict()["digest"],
                examples=len(examples),
                created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                ram_trl_version=__version__,
            )
            return str(store.commit(staged, agent, manifest))

    return world.run_on_main(write)


def squared_gradients(model: nn.Module, examples: Sequence[Example]) -> dict[str, Tensor]:
    """Sums over examples, one by one, of the squared gradient of the log-likelihood of the labels.

    Args:
        model (`nn.Module`):
            A causal language model.
        examples (`Sequence[tuple[list[int], list[int]]]`):
            Token ids and labels; a label of `IGNORED` does not count.

    Returns:
        `dict[str, Tensor]`: by the name of the parameter, in its shape, float32, on its device.
    """
    model.eval()
    sums = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in model.named_parameters()}
    device = next(model.parameters()).device
    for tokens, labels in examples:
        model.zero_grad(set_to_none=True)
        logits = model(input_ids=torch.tensor([tokens], device=device)).logits[0, :-1].float()
        targets = torch.tensor(labels[1:], device=device)
        nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name].addcmul_(parameter.grad, parameter.grad)
    model.zero_grad(set_to_none=True)
    return sums
