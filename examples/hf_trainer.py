"""Train a causal language model of HuggingFace transformers with simplefsdp under HuggingFace's Trainer.

    torchrun --standalone --nproc-per-node 2 -m examples.hf_trainer --model PATH --out out/hf-trainer

``PATH`` is a local folder as ``save_pretrained`` writes it; nothing is downloaded. ``ShardedTrainer`` is all that a
script of your own needs. A checkpoint of it has the weights as ``from_pretrained`` reads them, and the optimizer's
state in a file for each rank, which any number of ranks can read.
"""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from simplefsdp import clip_grad_norm_, full_state_dict, simple_fsdp
from simplefsdp.training.checkpoint import StrictLoadPlanner

from . import data


class ShardedTrainer(Trainer):
    """HuggingFace's Trainer for a model that ``simple_fsdp`` has sharded.

    The model is compiled for training, and neither wrapped in DDP nor given to Accelerate's ``prepare``. Gradients are
    clipped by the norm over all ranks, and reduced with the last micro-batch of a step.

    Args:
        model: the sharded model, not compiled.
        compile_options: options of ``torch.compile(..., backend="simplefsdp")``.
        kwargs: see ``transformers.Trainer``; ``load_best_model_at_end`` and searches of hyperparameters are not tested.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, model: Any, *, compile_options: Mapping[str, Any] | None = None, **kwargs: Any):
        super().__init__(model, **kwargs)
        self.compile_options = dict(compile_options or {})
        model.no_sync = lambda: _without_reductions(model)  # Accelerate calls it for all but the last micro-batch

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:  # noqa: ARG002
        if training and model is self.model:
            return torch.compile(model, backend="simplefsdp", options=self.compile_options)
        return model

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Gather the weights on the first rank, which writes them; every rank must call it."""
        self._save(output_dir, state_dict=full_state_dict(self.model))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = get_optimizer_state_dict(self.model, self._own_optimizer)
        dcp.save({"optimizer": state}, checkpoint_id=Path(output_dir, "optimizer"))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = get_optimizer_state_dict(self.model, self._own_optimizer)
        dcp.load({"optimizer": state}, checkpoint_id=Path(checkpoint, "optimizer"), planner=StrictLoadPlanner())
        # Not strict, as this rank may own the optimizer's state of some parameters only; the planner is strict for all.
        set_optimizer_state_dict(self.model, self._own_optimizer, state, options=StateDictOptions(strict=False))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True))

    @property
    def _own_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that Accelerate has wrapped."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


@contextmanager
def _without_reductions(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


class Sequences(Dataset[dict[str, Tensor]]):
    """Random crops of a text, as a causal language model of HuggingFace's takes them."""

    def __init__(self, count: int, seq_len: int):
        text, _ = data.load(None, seq_len)
        self.tokens, _ = data.random_crops(text, count, seq_len, 0)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="examples.hf_trainer", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder with config.json; weights are drawn")
    add("--out", type=Path, required=True, help="folder for checkpoints")
    add("--resume", metavar="CHECKPOINT", help="continue from this one")
    add("--steps", type=int, default=100)
    add("--accumulate", type=int, default=2, help="batches per rank and step")
    add("--batch-size", type=int, default=4, help="sequences per batch")
    add("--seq-len", type=int, default=256, help="bytes per sequence")
    add("--sequences", type=int, default=800, help="to train on in an epoch")
    add("--lower-with", choices=["inductor", "aot_eager"], default="inductor")
    args = parser.parse_args()

    training = TrainingArguments(
        str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_steps=args.steps,
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    torch.manual_seed(0)  # the same weights on every rank
    whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=torch.float32)
    model = simple_fsdp(whole.to(training.device))  # TrainingArguments has initialised the process group
    trainer = ShardedTrainer(
        model,
        args=training,
        train_dataset=Sequences(args.sequences, args.seq_len),
        compile_options={"lower_with": args.lower_with},
    )
    trainer.train(resume_from_checkpoint=args.resume)


if __name__ == "__main__":
    main()
