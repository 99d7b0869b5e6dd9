"""The callback that registers an agent when its training ends."""

import contextlib
import logging
import os
import shlex
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from .arithmetic.defaults import DEFAULT_EPSILON
from .distributed import World, current_world, shared_cores
from .errors import ConfigError, RamTrlError
from .merging.integrate import Integration, integrate_agents
from .options import load_function
from .progress import Progress
from .provenance import best_step, describe_run, executed_in, final_checkpoint, git_checkout
from .registering.live import LiveRegistration
from .registering.live_model import base_name, unwrap
from .registering.register import check_options
from .registering.training_log import CHECKPOINT, check_provenance
from .storage.checkpoint import Checkpoint
from .storage.generalists import Generalist
from .storage.registry import AgentRegistry, RegisteredAgent
from .terminal import progress_bar


__all__ = ["RAMRegistryCallback"]

logger = logging.getLogger(__name__)


class RAMRegistryCallback(TrainerCallback):
    """Puts the agent's task vector into a registry when training ends.

    What can be known to fail is refused when training begins. A failure at the end never costs the run: it is logged
    with its cause and the command that registers the agent from its checkpoint, `error` keeps it, training returns.

    Args:
        registry (`str`):
            Directory of the registry. It is created if need be.
        agent (`str`):
            Name of the agent. Every run makes a new version of it.
        base_model (`str`, *optional*):
            Directory or Hub id of the base model; by default what the trained model was loaded from. Name it when
            training goes on from a checkpoint that was loaded as a model.
        revision (`str`, *optional*):
            Revision of the base model on the Hub.
        snapshot_dtype (`str`, *optional*, defaults to `"auto"`):
            `"auto"` stores what rollouts and deployment execute: the parameters in their own dtype, or rounded to the
            base's if the run computed in it (autocast). `"float32"`, `"bfloat16"` and `"float16"` force one.
        epsilon (`float`, *optional*, defaults to `1e-5`):
            Where values are stored in float32, changes of at most this size are not stored.
        merge_to (`str`, *optional*):
            Name of a generalist: when the agent is registered, the same ranks merge the registry's agents into its
            next version.
        merge_config (`Mapping`, *optional*):
            How to merge: `agents`, `gate`, `method`, `r`, ... as in [`integrate_agents`]. The gate may be named, as
            `"module:function"`.
        strict (`bool`, *optional*, defaults to `False`):
            Raise at the end of training, on all ranks, if the agent cannot be registered or merged.
        provenance (`str`, *optional*, defaults to `"full"`):
            What is recorded of where the agent comes from (docs/TRAINING.md). `"minimal"` leaves out what may be
            private: options of the run, names of reward functions, data, git, paths.

    Attributes:
        registered ([`RegisteredAgent`], *optional*):
            The new version, on rank 0, after training.
        generalist ([`~ram_trl.storage.generalists.Generalist`], *optional*):
            The new version of the generalist, on every rank, after training.
        error (`Exception`, *optional*):
            Why the agent was not registered or not merged.

    Example:

    ```python
    from ram_trl import RAMRegistryCallback

    trainer = GRPOTrainer(..., callbacks=[RAMRegistryCallback("registry", agent="math")])
    trainer.train()
    ```
    """

    def __init__(
        self,
        registry: str,
        agent: str,
        base_model: str | None = None,
        revision: str | None = None,
        snapshot_dtype: str = "auto",
        epsilon: float = DEFAULT_EPSILON,
        merge_to: str | None = None,
        merge_config: Mapping[str, Any] | None = None,
        strict: bool = False,
        provenance: str = "full",
    ):
        check_options(agent, snapshot_dtype, epsilon)
        check_provenance(provenance)
        self._registration = LiveRegistration(
            registry=AgentRegistry(registry),
            agent=agent,
            base_model=None if base_model is None else os.fspath(base_model),
            revision=revision,
            snapshot_dtype=snapshot_dtype,
            epsilon=epsilon,
        )
        self._revision = revision
        self._provenance = provenance
        self._began = 0.0
        self._checkout: dict[str, Any] | None = None
        self._integration = _integration(merge_to, merge_config)
        self.strict = strict
        self.registered: RegisteredAgent | None = None
        self.generalist: Generalist | None = None
        self.error: Exception | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module = None, **kwargs
    ) -> None:
        self.registered, self.generalist, self.error = None, None, None
        registration, world = self._registration, current_world()
        self._began = time.time()
        # now, as the files may move on while it lasts
        self._checkout = git_checkout() if world.is_main and self._provenance == "full" else None
        registration.revision = self._revision
        if registration.base_model is None and registration.revision is None:
            # TRL's configurations say here which revision of the model they load.
            registration.revision = (getattr(args, "model_init_kwargs", None) or {}).get("revision")
        registration.check(model, world, executed_in(args), args.output_dir, is_fresh=state.global_step == 0)
        if self._integration is not None:
            world.run_on_main(self._check_integration)
        base = registration.base_model or base_name(unwrap(model))
        if world.is_main and CHECKPOINT.fullmatch(Path(base).name):
            logger.warning(
                "the base of agent %r is %s, a checkpoint of another run: to merge it with agents of the model that "
                "run started from, pass base_model=",
                registration.agent,
                base,
            )
        inside = Path(args.output_dir).resolve() in Path(registration.registry.path).resolve().parents
        if world.is_main and args.push_to_hub and inside:
            logger.warning("the registry %s is inside output_dir and would be pushed too", registration.registry.path)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module = None,
        train_dataloader: DataLoader | None = None,
        **kwargs,
    ) -> None:
        world = current_world()
        computed_in = executed_in(args)
        try:
            training = describe_run(args, state, self._provenance, train_dataloader, self._checkout)
            with _progress(args, world) as progress:
                self.registered = self._registration.register(model, world, computed_in, training, progress)
        except Exception as error:
            _release_frames(error)
            self.error = error
            # an error of another kind is known to this rank alone, or comes from the death of another
            if world.is_main or not isinstance(error, RamTrlError):
                logger.error(
                    "agent %r was NOT registered: %s\nThe trained model is unharmed. When that is mended, run:\n  %s",
                    self._registration.agent,
                    error if isinstance(error, RamTrlError) else repr(error),
                    self._retry_command(args, state, model, computed_in),
                    exc_info=not isinstance(error, RamTrlError),
                )
        if self.registered is not None:
            best, weights = best_step(args, state), ""
            if best is not None:
                weights = f", with the weights of its best checkpoint (step {best})"
            message = f"registered {self.registered} in {self._registration.registry.path}{weights}"
            logger.info(message)
            if not args.disable_tqdm:
                tqdm.write(message)
            if state.global_step < state.max_steps:
                steps = f"{state.global_step} of {state.max_steps} steps{weights}"
                logger.warning("agent %s was registered after %s", self.registered, steps)
        if self._integration is not None:
            self._integrate(args, world, self._integration)
        if self.strict and self.error is not None:
            raise self.error

    def _check_integration(self) -> None:
        registration, gate = self._registration, self._integration.options.get("gate")
        self._integration.check(registration.registry, registration.agent, Checkpoint.open(*registration.opened))
        if gate is not None and is_deepspeed_zero3_enabled():
            raise ConfigError(
                "under DeepSpeed ZeRO-3 a gate that loads the candidate waits for the other ranks for ever: leave it "
                "out of merge_config, or leave merge_to out and run recipes/merge.py --merge_to with --gate later"
            )

    def _integrate(self, args: TrainingArguments, world: World, integration: Integration) -> None:
        """Merge the agents into the generalist's next version. A failure costs neither the run nor the agent."""
        registry = self._registration.registry
        try:
            # one rank may have failed alone
            if any(world.gather(self.error is not None)):
                return
            with _progress(args, world) as progress, shared_cores():
                self.generalist = integrate_agents(
                    registry, integration.generalist, world=world, progress=progress, **integration.options
                )
        except Exception as error:
            if self.error is not None:
                # a process ended while the agent was registered
                return
            _release_frames(error)
            self.error = error
            if world.is_main:
                logger.error(
                    "%s is registered, but generalist %r was NOT merged: %s\nMerge it later with:\n  %s",
                    self.registered,
                    integration.generalist,
                    error if isinstance(error, RamTrlError) else repr(error),
                    integration.command(registry),
                    exc_info=not isinstance(error, RamTrlError),
                )
            return
        if world.is_main:
            message = f"merged {self.generalist} of {', '.join(self.generalist.parents)}"
            if self.generalist.manifest.refused is not None:
                message += f", which was not promoted: {self.generalist.manifest.refused}"
            logger.info(message)
            if not args.disable_tqdm:
                tqdm.write(message)

    def _retry_command(
        self, args: TrainingArguments, state: TrainerState, model: nn.Module, computed_in: torch.dtype | None
    ) -> str:
        """The command that registers from disk what could not be registered from memory."""
        registration, checkpoint = self._registration, final_checkpoint(args, state, self._began)
        dtype = registration.snapshot_dtype
        if dtype == "auto" and computed_in in registration.base_dtypes:
            # a checkpoint does not tell what its run computed in
            dtype = str(computed_in).removeprefix("torch.")
        options = {
            "registry": str(registration.registry.path),
            "agent": registration.agent,
            "base_model": registration.base_model or base_name(unwrap(model)),
            "revision": registration.revision,
            "model": checkpoint or "DIR",
            "snapshot_dtype": None if dtype == "auto" else dtype,
            "epsilon": None if registration.epsilon == DEFAULT_EPSILON else str(registration.epsilon),
            "provenance": None if self._provenance == "full" else self._provenance,
        }
        given = {name: shlex.quote(value) for name, value in options.items() if value is not None}
        command = "ram-trl register " + " ".join(f"--{name} {value}" for name, value in given.items())
        return command if checkpoint else f"{command}\n  (after trainer.save_model(DIR): there is no checkpoint of it)"


def _integration(merge_to: str | None, merge_config: Mapping[str, Any] | None) -> Integration | None:
    if merge_config is not None and (merge_to is None or not isinstance(merge_config, Mapping)):
        raise ConfigError("merge_config is a mapping of options for merge_to: name a generalist")
    if merge_to is None:
        return None
    options = dict(merge_config or {})
    if isinstance(options.get("gate"), str):
        options["gate"] = load_function(options["gate"], "gate")
    return Integration(merge_to, options)


@contextlib.contextmanager
def _progress(args: TrainingArguments, world: World) -> Iterator[Progress | None]:
    with progress_bar() if world.is_main and not args.disable_tqdm else contextlib.nullcontext() as progress:
        yield progress


def _release_frames(error: BaseException) -> None:
    """Let go of the tensors that the frames of an error hold."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
