"""Train a Llama, on Python's standard library, with simplefsdp under Lightning's Trainer.

    torchrun --standalone --nproc-per-node 2 -m examples.lightning_module --out out/lightning

``ModelParallelStrategy`` leaves sharding to ``configure_model``, and loads and saves whatever is made of DTensors.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from simplefsdp import clip_grad_norm_, sharded_init, simple_fsdp
from simplefsdp.models import llama

from . import data


class Module(LightningModule):
    def __init__(self, lower_with: str):
        super().__init__()
        self.lower_with = lower_with
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is not None:  # it is called again by each of the trainer's methods
            return
        mesh: Any = self.device_mesh
        with torch.device("meta"):
            self.model = simple_fsdp(llama.build("debug"), mesh["data_parallel"])
        self.model.to_empty(device=self.trainer.strategy.root_device)
        torch.manual_seed(0)
        with sharded_init():
            self.model.reset_parameters()
        self.model.compile(backend="simplefsdp", options={"lower_with": self.lower_with})

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        steps = (index + 1) % self.trainer.accumulate_grad_batches == 0 or self.trainer.is_last_batch
        self.model.set_requires_gradient_sync(steps)
        loss = self.model(*batch)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_gradient_clipping(self, *_: Any, gradient_clip_val: float | None = None, **__: Any) -> None:
        if gradient_clip_val is not None:
            clip_grad_norm_(self.parameters(), gradient_clip_val)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=4e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main() -> None:
    parser = argparse.ArgumentParser(prog="examples.lightning_module", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for losses and checkpoints")
    add("--resume", metavar="CHECKPOINT", help="continue from this one")
    add("--epochs", type=int, default=2, help="number of the last epoch, each of which ends with a checkpoint")
    add("--sequences", type=int, default=800, help="to train on in an epoch")
    add("--accumulate", type=int, default=2, help="batches per rank and step")
    add("--batch-size", type=int, default=4, help="sequences per batch")
    add("--seq-len", type=int, default=256, help="bytes per sequence")
    add("--one-file", action="store_true", help="checkpoints that rank 0 gathers, instead of one file a rank")
    add("--lower-with", choices=["inductor", "aot_eager"], default="inductor")
    args = parser.parse_args()

    ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = Trainer(
        strategy=ModelParallelStrategy(ranks, 1, save_distributed_checkpoint=not args.one_file),
        devices=here,
        num_nodes=ranks // here,
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        logger=CSVLogger(args.out),
        callbacks=[ModelCheckpoint(args.out, filename="{epoch}")],
        log_every_n_steps=1,
    )
    text, _ = data.load(None, args.seq_len)
    sequences = TensorDataset(*data.random_crops(text, args.sequences, args.seq_len, 0))
    trainer.fit(Module(args.lower_with), DataLoader(sequences, args.batch_size), ckpt_path=args.resume)


if __name__ == "__main__":
    main()
