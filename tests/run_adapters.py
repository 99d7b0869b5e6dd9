"""Two processes train adapters with DDP; each writes `FOLDER/RANK.json`. `test_adapters.py` starts it.

torchrun --nproc_per_node 2 run_adapters.py FOLDER BASE
"""

import json
import sys
from pathlib import Path

from peft import LoraConfig
from safetensors.torch import save_file
from test_adapters import LORA, merged_by_peft
from training import grpo, train

from ram_trl import RAMRegistryCallback
from ram_trl.distributed import current_world


def main(folder: Path, base: Path) -> None:
    kinds = {}
    for name, options in {"dora": {"use_dora": True}, "pissa": {"init_lora_weights": "pissa"}}.items():
        callback = RAMRegistryCallback(folder / "registry", agent=name, strict=True)
        config = LoraConfig(**LORA, **options)
        trainer = train(grpo(base, folder / name, [callback], config, ddp_backend="gloo"))
        world = current_world()
        assert world.size == 2
        assert (callback.registered is not None) == world.is_main
        kinds[name] = callback.registered.manifest.kind if world.is_main else None
        if world.is_main:
            save_file(merged_by_peft(trainer.model, folder / f"{name}-merged"), folder / f"{name}.safetensors")
    (folder / f"{world.rank}.json").write_text(json.dumps(kinds))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
