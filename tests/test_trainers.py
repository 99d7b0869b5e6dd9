"""The callback in trainers other than GRPO: what is registered is what the trainer saves, bit for bit."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from models import Zoo, merged_by_peft, read_model, tokenizer
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import nn
from training import (
    BF16,
    LORA,
    OPTIONS,
    ROLLOUTS,
    assert_same_weights,
    restored_weights,
    reward,
    saved_weights,
    train,
)
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from ram_trl import RAMRegistryCallback
from ram_trl.errors import RamTrlError


SUMS = [(f"{number}+{number}=", f"{2 * number}") for number in range(8)]
# what a trainer learns from, and the options that only it has
TRL_TRAINERS = {
    "rloo": (RLOOTrainer, RLOOConfig, [{"prompt": ask} for ask, _ in SUMS], ROLLOUTS),
    "dpo": (DPOTrainer, DPOConfig, [{"prompt": ask, "chosen": says, "rejected": "no"} for ask, says in SUMS], {}),
    "sft": (SFTTrainer, SFTConfig, [{"text": ask + says} for ask, says in SUMS], {}),
    "kto": (
        KTOTrainer,
        KTOConfig,
        [{"prompt": ask, "completion": says, "label": len(says) > 1} for ask, says in SUMS],
        {},
    ),
}


def trl_trainer(
    kind: str,
    model: Path | nn.Module,
    output_dir: Path,
    callbacks: Sequence[TrainerCallback],
    peft_config: PeftConfig | None = None,
    **options,
) -> Trainer:
    """One of TRL's trainers for two steps; `options` are those of its configuration."""
    torch.manual_seed(0)
    trainer, config, rows, own = TRL_TRAINERS[kind]
    return trainer(
        model=str(model) if isinstance(model, Path) else model,
        args=config(output_dir=str(output_dir), **{**OPTIONS, **own, **options}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        peft_config=peft_config,
        **({"reward_funcs": reward} if kind == "rloo" else {}),
    )


def plain_trainer(model: nn.Module, output_dir: Path, callbacks: Sequence[TrainerCallback]) -> Trainer:
    """transformers' own trainer, with its defaults wherever they can be had on a CPU."""
    torch.manual_seed(0)
    rows = tokenizer()([ask + says for ask, says in SUMS], padding=True, return_token_type_ids=False)
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(output_dir),
            max_steps=2,
            learning_rate=1e-3,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({**rows, "labels": rows["input_ids"]}),
        callbacks=list(callbacks),
    )


def load(base: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype)


def assert_moved(trained: dict[str, torch.Tensor], base: Path) -> None:
    assert any(not torch.equal(trained[name].to(tensor.dtype), tensor) for name, tensor in read_model(base).items())


@pytest.mark.parametrize("given", ["by_name", "as_an_object"])
@pytest.mark.parametrize("kind", TRL_TRAINERS)
def test_a_full_fine_tune_of_every_other_trl_trainer_is_registered_as_it_is_saved(zoo: Zoo, tmp_path, kind, given):
    base = zoo.base("qwen2_untied")
    model, options = (base, BF16) if given == "by_name" else (load(base), {})
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math")
    trainer = train(trl_trainer(kind, model, tmp_path / "out", [callback], **options))

    assert callback.error is None
    trained = saved_weights(trainer, tmp_path / "saved")
    assert_moved(trained, base)
    assert_same_weights(restored_weights(tmp_path / "registry", "math", tmp_path / "back"), trained)
    manifest = callback.registered.manifest
    assert (manifest.kind, manifest.base_model.name) == ("full", str(base))
    assert (manifest.training["arguments"], manifest.training["step"]) == (type(trainer.args).__name__, 2)


@pytest.mark.parametrize("kind", TRL_TRAINERS)
def test_an_adapter_of_every_other_trl_trainer_is_registered_as_it_is_saved(zoo: Zoo, tmp_path, kind):
    base = zoo.base("qwen2_untied")
    callback = RAMRegistryCallback(tmp_path / "registry", agent="lora")
    trainer = train(trl_trainer(kind, base, tmp_path / "out", [callback], LoraConfig(**LORA), **BF16))

    assert callback.error is None
    assert callback.registered.manifest.kind == "lora"
    assert_same_weights(read_model(callback.registered.path), saved_weights(trainer, tmp_path / "saved"))
    merged = merged_by_peft(base, tmp_path / "saved", tmp_path / "merged")
    assert_moved(merged, base)
    assert_same_weights(restored_weights(tmp_path / "registry", "lora", tmp_path / "back"), merged)


def test_a_plain_trainers_float32_model_is_registered_as_it_is_saved(zoo: Zoo, tmp_path):
    base = zoo.base("gpt2", torch.float32)
    callback = RAMRegistryCallback(tmp_path / "registry", agent="math", epsilon=0.0)
    trainer = train(plain_trainer(load(base, torch.float32), tmp_path / "out", [callback]))

    assert callback.error is None
    trained = saved_weights(trainer, tmp_path / "saved")
    assert_moved(trained, base)
    assert_same_weights(restored_weights(tmp_path / "registry", "math", tmp_path / "back"), trained)
    manifest = callback.registered.manifest
    assert (manifest.snapshot.dtype, manifest.training["arguments"]) == ("float32", "TrainingArguments")


class OwnModel(nn.Module):
    """A causal language model that is none of transformers'."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.embed(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_a_model_that_nothing_was_loaded_into_is_refused_with_the_cure(zoo: Zoo, tmp_path):
    for base, message in ((None, "pass base_model="), (zoo.base("gpt2"), "'embed.weight', which the base .* lacks")):
        callback = RAMRegistryCallback(tmp_path / "registry", agent="math", base_model=base)
        trainer = plain_trainer(OwnModel(), tmp_path / "out", [callback])
        with pytest.raises(RamTrlError, match=message):
            train(trainer)
        assert trainer.state.global_step == 0


def test_a_plain_trainers_adapter_is_registered_as_it_is_saved(zoo: Zoo, tmp_path):
    base = zoo.base("qwen2_tied")
    callback = RAMRegistryCallback(tmp_path / "registry", agent="lora")
    trainer = train(plain_trainer(get_peft_model(load(base), LoraConfig(**LORA)), tmp_path / "out", [callback]))

    assert callback.error is None
    assert_same_weights(read_model(callback.registered.path), saved_weights(trainer, tmp_path / "saved"))
    merged = merged_by_peft(base, tmp_path / "saved", tmp_path / "merged")
    assert_moved(merged, base)
    assert_same_weights(restored_weights(tmp_path / "registry", "lora", tmp_path / "back"), merged)
