"""Two ranks of a tiny model under Ray Train's TorchTrainer, for `benchmarks.start_overhead`: when is their first step done?

    python -m benchmarks.torch_trainer --address ADDRESS --folder DIR

It joins a running Ray cluster, as a script that Ray Jobs runs would, and prints the time of rank 0's first step, in seconds
since the epoch.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

NUM_RANKS = 2


def train(config: dict[str, Any]) -> None:
    """Take one optimizer step; rank 0 notes when it is done."""
    import torch
    from ray import train
    from ray.train.torch import prepare_model

    embedding, head = torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256)
    model = prepare_model(torch.nn.Sequential(embedding, torch.nn.TransformerEncoderLayer(32, 2, 128, batch_first=True), head))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(256, (2, 33))
    logits = model(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    if train.get_context().get_world_rank() == 0:
        Path(config["noted"]).write_text(str(time.time()))


def main() -> int:
    """Run the trainer once."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", required=True, help="of the Ray cluster")
    parser.add_argument("--folder", type=Path, required=True, help="for what Train stores")
    options = parser.parse_args()
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address=options.address, log_to_driver=False)
    noted = options.folder / "first_step"
    trainer: Any = TorchTrainer(
        train,
        train_loop_config={"noted": str(noted)},
        scaling_config=ScalingConfig(num_workers=NUM_RANKS, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(options.folder)),
    )
    trainer.fit()
    sys.stdout.write(f"{noted.read_text()}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
