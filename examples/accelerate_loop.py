"""Train a Llama, on Python's standard library, with simplefsdp in a loop of HuggingFace Accelerate.

    torchrun --standalone --nproc-per-node 2 -m examples.accelerate_loop --out out/accelerate

Accelerate's ``prepare`` gets the dataloader only: it would wrap the model in ``DistributedDataParallel``, and of the
optimizer save what rank 0 holds. Hooks make both part of its checkpoints.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from simplefsdp import clip_grad_norm_, simple_fsdp
from simplefsdp.models import llama

from . import checkpoints, data


def main() -> None:
    parser = argparse.ArgumentParser(prog="examples.accelerate_loop", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for Accelerate's checkpoint; if there is one, train on from it")
    add("--steps", type=int, default=100, help="number of the last step")
    add("--accumulate", type=int, default=2, help="batches per rank and step")
    add("--batch-size", type=int, default=4, help="sequences per batch")
    add("--seq-len", type=int, default=256, help="bytes per sequence")
    add("--lower-with", choices=["inductor", "aot_eager"], default="inductor")
    args = parser.parse_args()

    # Without cpu=True Accelerate does not see the ranks on CPU, and each would train on all batches.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.accumulate)
    set_seed(0)  # the same on every rank, as its weights must be
    model: Any = simple_fsdp(llama.build("debug").to(accelerator.device))
    compiled = torch.compile(model, backend="simplefsdp", options={"lower_with": args.lower_with})
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    batches = args.steps * args.accumulate * accelerator.num_processes
    text, _ = data.load(None, args.seq_len)
    sequences = TensorDataset(*data.random_crops(text, batches * args.batch_size, args.seq_len, 0))
    loader = accelerator.prepare(DataLoader(sequences, args.batch_size))

    accelerator.register_for_checkpointing(scheduler)
    accelerator.register_save_state_pre_hook(
        lambda _models, _weights, folder: checkpoints.save(Path(folder), model, optimizer, step=0)
    )
    accelerator.register_load_state_pre_hook(
        lambda _models, folder: checkpoints.load(Path(folder) / "checkpoint_0", model, optimizer)
    )
    if args.out.exists():
        accelerator.load_state(str(args.out))

    for tokens, targets in accelerator.skip_first_batches(loader, scheduler.last_epoch * args.accumulate):
        with accelerator.accumulate():
            model.set_requires_gradient_sync(accelerator.sync_gradients)
            loss = compiled(tokens, targets)
            accelerator.backward(loss)
        if accelerator.sync_gradients:
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), "mean")
            accelerator.print(f"step {scheduler.last_epoch} loss {mean:.5f} norm {norm:.5f}")
    part = args.out.with_name(args.out.name + ".part")
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(args.out, ignore_errors=True)
        part.rename(args.out)  # whole, or not there
    accelerator.end_training()


if __name__ == "__main__":
    main()
