"""A merge, an agent or a model of a directory, for a while, in the memory of a loaded base model.

```python
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B-Instruct", dtype="auto", device_map="auto")
with ram_trl.apply_merge(model, "registry", method="ram_plus", r=0.1) as report:
    ...  # the model is the merged one
# and here it is the base again, bit for bit
```

Neither memory nor disk holds a copy of the model: on leaving, the base is read again from its files. Therefore every
tile that is overwritten must hold the base's values when the context is entered, and is compared with them.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import SINGLE
from ..errors import BaseModelError, UnsupportedModelError
from ..merging.merge import run_passes
from ..merging.plan import MergeSettings, plan_merge
from ..progress import Progress
from ..registering.checks import COMPUTED_BUFFERS
from ..registering.restore import restored_dtype, write_agent
from ..storage.base_model import open_recorded_base
from ..storage.checkpoint import Checkpoint
from ..storage.registry import AgentRegistry, RegisteredAgent
from ..storage.tensor_file import PIECE_NUMEL, TensorInfo, digest_piece
from ..task_vector import open_task_vector
from ..threads import in_threads
from .places import find_places, held_ranges


__all__ = ["apply_agent", "apply_directory", "apply_merge"]


@contextmanager
def apply_merge(
    model: nn.Module,
    registry: AgentRegistry | str,
    *,
    agents: list[str] | None = None,
    base_model: str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Iterator[dict[str, Any]]:
    """While the context lasts, a loaded base model is the merge of registered agents.

    Inside it is, bit for bit, what `from_pretrained(DIR, dtype=...)` gives of the directory that [`merge_agents`]
    writes with the same arguments: values are rounded to `output_dtype` first, and then to the dtype of the parameter
    in memory. Afterwards it is the base again, bit for bit, also after an exception.

    Args:
        model (`nn.Module`):
            Model of transformers with the base's weights, on one or several devices, in any floating dtype, without
            adapters.
        registry ([`AgentRegistry`] or `str`):
            The registry.
        agents (`list[str]`, *optional*):
            Agents to merge, `"math"` or `"math@v2"`; by default the latest version of every agent.
        base_model (`str`, *optional*):
            Where the base model's files are now, if not where they were. They are read on entering and on leaving.
        progress (`Callable`, *optional*):
            Called with what is being done, the bytes done and the bytes to do.
        **settings:
            `method`, `r`, `alpha`, `epsilon`, `weights`, `output_dtype`, ...: see [`merge_agents`].

    Yields:
        `dict`: the content of `merge_report.json`.

    Raises:
        BaseModelError: if the model in memory does not hold the base's values; it is left as it was.
        UnsupportedModelError: if a parameter cannot be written to or not be found in the base's files.
    """
    plan = plan_merge(AgentRegistry(registry), agents, MergeSettings(**settings), base_model)
    with contextlib.closing(plan):
        held = _HeldModel(model, plan.base, plan.agents[0], plan.touched_by)
        with held.restored():
            report = run_passes(plan, lambda: held, world=SINGLE, progress=progress)
            yield report


@contextmanager
def apply_agent(
    model: nn.Module,
    registry: AgentRegistry | str,
    agent: str,
    *,
    base_model: str | None = None,
    progress: Progress | None = None,
) -> Iterator[RegisteredAgent]:
    """While the context lasts, a loaded base model is a registered agent, as [`restore_agent`] would write it.

    Args:
        model (`nn.Module`):
            As for [`apply_merge`].
        registry ([`AgentRegistry`] or `str`):
            The registry.
        agent (`str`):
            `"math"` (its latest version) or `"math@v2"`.
        base_model (`str`, *optional*):
            Where the base model's files are now, if not where they were.
        progress (`Callable`, *optional*):
            Called with what is being done, the bytes done and the bytes to do.

    Yields:
        [`RegisteredAgent`]: the agent.

    Raises:
        RamTrlError: as [`apply_merge`].
    """
    registered = AgentRegistry(registry).get(agent)
    registered.verify()
    base = open_recorded_base(registered, base_model)
    with contextlib.closing(open_task_vector(registered)) as task_vector:
        held = _HeldModel(model, base, registered, task_vector.changed_tensors)
        infos = [
            TensorInfo(info.name, restored_dtype(registered, info, held.records), info.shape)
            for info in base.tensors.values()
        ]
        with held.restored():
            write_agent(registered, base, task_vector, infos, held, progress)
            base.check_unchanged()
            task_vector.check_unchanged()
            yield registered


@contextmanager
def apply_directory(
    model: nn.Module,
    agent: RegisteredAgent,
    directory: str,
    *,
    base_model: str | None = None,
    progress: Progress | None = None,
) -> Iterator[Checkpoint]:
    """While the context lasts, a loaded base model has the weights of another directory, like that of a merged model.

    Args:
        model (`nn.Module`):
            As for [`apply_merge`].
        agent ([`RegisteredAgent`]):
            An agent of the base, which recorded what the base is.
        directory (`str`):
            Model directory or Hub id, with the base's tensors and shapes.
        base_model (`str`, *optional*):
            Where the base model's files are now, if not where they were.
        progress (`Callable`, *optional*):
            Called with what is being done, the bytes done and the bytes to do.

    Yields:
        [`~ram_trl.storage.checkpoint.Checkpoint`]: the directory.

    Raises:
        RamTrlError: as [`apply_merge`]; [`UnsupportedModelError`] if the directory holds other tensors than the base.
    """
    base, source = open_recorded_base(agent, base_model), Checkpoint.open(directory)
    for name in {*base.tensors, *source.tensors}:
        ours, theirs = base.tensors.get(name), source.tensors.get(name)
        if (ours and ours.shape) != (theirs and theirs.shape) and not name.endswith(COMPUTED_BUFFERS):
            raise UnsupportedModelError(
                f"{source.name} is no model of the base {base.name}: tensor {name!r} is in one of them only, or has "
                "another shape; evaluate it in a registry of its own"
            )
    held = _HeldModel(model, base, agent, source.tensors)
    done, total = 0, sum(info.nbytes for info in source.tensors.values())
    with held.restored():
        for info in source.tensors.values():
            for start in range(0, info.numel, PIECE_NUMEL):
                stop = min(start + PIECE_NUMEL, info.numel)
                held.write(info.name, start, source.read(info.name, start, stop))
            done += info.nbytes
            if progress:
                progress("read", done, total)
        source.check_unchanged()
        yield source


class _HeldModel:
    """The parameters of a loaded model, as something that a merge can be written to, and that becomes the base again.

    Args:
        model (`nn.Module`):
            The model.
        base ([`~ram_trl.storage.checkpoint.Checkpoint`]):
            Its base, whose values it must hold.
        agent ([`~ram_trl.storage.registry.RegisteredAgent`]):
            An agent that recorded the base.
        needed (`Collection[str]`):
            Tensors that are going to be changed.
    """

    def __init__(self, model: nn.Module, base: Checkpoint, agent: RegisteredAgent, needed):
        self.records = agent.tensors()
        self._base = base
        self._places = find_places(model, base.tensors, self.records, needed)
        # digest of the base's bytes for every range that was overwritten, by name, start and stop
        self._overwritten: dict[tuple[str, int, int], bytes] = {}
        # threads that write now, and whether the model is becoming the base again, after which none may begin to
        self._state = threading.Condition()
        self._num_writing, self._is_leaving = 0, False

    def write(self, name: str, start: int, tile: Tensor) -> None:
        """Put some values in the place of the base's. What is there must be the base's."""
        place = self._places.get(name)
        if place is None:
            # tied to a tensor that has a place, or not part of the model
            return
        stop = start + tile.numel()
        stored = self._base.read(name, start, stop)
        base, values = stored.to(place.dtype), tile.to(place.dtype)
        for begin, end, part in held_ranges(place, start, stop):
            if not _same_bits(part.cpu(), base[begin - start : end - start]):
                raise BaseModelError(
                    f"the model in memory is not its base {self._base.name}: tensor {name!r} has other values; load "
                    "the base itself, and do not train it"
                )
        if _same_bits(values, base):
            return
        digest = digest_piece(stored)
        with self._writing():
            self._overwritten[name, start, stop] = digest
            self._put(place, start, values)

    def close(self) -> None:
        """Everything was written."""

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the base back when the block is left."""
        try:
            yield
        finally:
            self._restore()

    @contextmanager
    def _writing(self, is_restoring: bool = False) -> Iterator[None]:
        with self._state:
            if self._is_leaving and not is_restoring:
                # an interrupt has ended the merge before its threads
                raise BaseModelError("the model is becoming the base again")
            self._num_writing += 1
        try:
            yield
        finally:
            with self._state:
                self._num_writing -= 1
                self._state.notify_all()

    def _restore(self) -> None:
        """Give everything back, however often Ctrl-C is pressed meanwhile; it is heard afterwards."""
        interrupt = None
        while self._overwritten or self._num_writing or not self._is_leaving:
            try:
                with self._state:
                    self._is_leaving = True
                    self._state.wait_for(lambda: not self._num_writing)
                with contextlib.closing(in_threads(self._restore_range, list(self._overwritten.items()))) as restored:
                    for (place, _), _ in restored:
                        del self._overwritten[place]
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _restore_range(self, overwritten: tuple[tuple[str, int, int], bytes]) -> None:
        (name, start, stop), digest = overwritten
        stored = self._base.read(name, start, stop)
        if digest_piece(stored) != digest:
            raise BaseModelError(
                f"{self._base.name} was changed (tensor {name!r}) while the model in memory was another, which cannot "
                "become the base again: load it anew"
            )
        place = self._places[name]
        with self._writing(is_restoring=True):
            self._put(place, start, stored.to(place.dtype))

    def _put(self, place: Tensor, start: int, values: Tensor) -> None:
        for begin, end, part in held_ranges(place, start, start + values.numel()):
            part.copy_(values[begin - start : end - start])


def _same_bits(one: Tensor, other: Tensor) -> bool:
    # NaN equals itself here, and zero has a sign
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
