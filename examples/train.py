"""Train a Llama on text with simplefsdp.

    torchrun --standalone --nproc-per-node 2 -m examples.train

The sharding is two lines of ``main``: ``simple_fsdp(model)`` and ``torch.compile(model, backend="simplefsdp")``.
"""

import argparse
import json
import math
import os
import resource
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm

from inductor_passes.ops.wire_formats import GATHER_FORMATS, REDUCE_FORMATS
from simplefsdp import Ranger21, WireFormat, clip_grad_norm_, galore, muon, simple_fsdp, wire_errors
from simplefsdp.frontend.embedding_lookup import LOOKUPS
from simplefsdp.models import llama
from simplefsdp.training.wire_errors import WireError

from . import checkpoints, data


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="examples.train", description="Train a Llama on text with simplefsdp.")
    add = parser.add_argument
    add("--model", choices=llama.CONFIGS, default="debug", help="shape of the model (vocabulary: 256 bytes)")
    add("--data", metavar="PATH_OR_GLOB", help="text to train on (default: Python's standard library)")
    add("--out", type=Path, default=Path("out/train"), help="folder for metrics.jsonl and checkpoints")
    add("--resume", metavar="CHECKPOINT", help="continue from this one; 'newest': from the latest in --out, if any")
    add("--checkpoint-every", type=int, metavar="STEPS", help="save every so many steps (default: at the end)")
    add("--steps", type=int, default=300, help="number of the last step")
    add("--batch-size", type=int, default=8, help="sequences per rank and step")
    add("--seq-len", type=int, default=256, help="bytes per sequence")
    add("--optimizer", choices=["adamw", "muon", "galore", "ranger21"], default="adamw")
    add("--moments", choices=["full", "factored", "8bit"], default="full", help="of galore")
    add("--lr", type=float, default=4e-3, help="peak learning rate")
    add("--warmup", type=int, default=30, help="steps of linear warm-up before the cosine decay")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--seed", type=int, default=0)
    add("--mixed-precision", choices=["none", "bf16"], default="none", help="dtype of compute and gathers")
    add("--activation-checkpointing", choices=["none", "block", "selective"], default="none")
    add("--embedding-lookup", default="gather", choices=LOOKUPS, help="exchange: tokens travel, embeddings stay")
    add("--wire-gather", choices=GATHER_FORMATS, help="format in which weights travel (default: as they are)")
    add("--wire-reduce", choices=REDUCE_FORMATS, help="format in which gradients travel (default: as they are)")
    add("--wire-between-nodes", choices=REDUCE_FORMATS, help="their format between nodes (default: as --wire-reduce)")
    add("--wire-errors-every", type=int, metavar="STEPS", help="log how far off a block's weights and gradients are")
    add("--keep-unsharded", action="store_true", help="reshard_after_forward=False: more memory, no second gather")
    add("--plan", default="block", help="bucketing plan of the backend")
    add("--lower-with", choices=["inductor", "aot_eager"], default="inductor")
    add("--report-dir", help="where the backend writes its graphs")
    add("--sample", type=int, default=200, help="bytes of text to generate at the end")
    args = parser.parse_args()
    if args.resume not in (None, "newest") and not Path(args.resume).is_dir():
        parser.error(f"--resume {args.resume}: no such checkpoint")
    if args.checkpoint_every is not None and args.checkpoint_every < 1:
        parser.error(f"--checkpoint-every {args.checkpoint_every}: expected a positive number")
    formats = args.wire_gather or args.wire_reduce
    if args.wire_errors_every is not None and not (formats and args.wire_errors_every > 0):
        parser.error("--wire-errors-every: needs a positive number, and --wire-gather or --wire-reduce")
    return args


def main() -> None:
    args = parse_arguments()
    train_text, held_out = data.load(args.data, args.seq_len)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(args.seed)  # every rank starts from the same weights
    model = llama.build(
        args.model,
        vocab_size=256,
        max_seq_len=max(1024, args.seq_len),
        activation_checkpointing=args.activation_checkpointing,
    ).to(device)
    wire = WireFormat(args.wire_gather, args.wire_reduce, args.wire_between_nodes)
    simple_fsdp(
        model,
        mp_policy=mixed_precision(args),
        reshard_after_forward=not args.keep_unsharded,
        wire=wire,
        embedding_lookup=args.embedding_lookup,
    )
    options = {"plan": args.plan, "lower_with": args.lower_with, "report_dir": args.report_dir}
    compiled = torch.compile(model, backend="simplefsdp", options=options)
    optimizer = make_optimizer(args, model)
    resumed = checkpoints.newest(args.out) if args.resume == "newest" else args.resume and Path(args.resume)
    first_step = checkpoints.load(resumed, model, optimizer) if resumed else 0
    if first_step > args.steps:
        raise SystemExit(f"--steps {args.steps}: {resumed} is of step {first_step} already")

    log = Log(args.out, first_step, args.steps)
    log.print(
        f"{args.model} Llama, {sum(p.numel() for p in model.parameters()):,} parameters on {dist.get_world_size()} "
        f"ranks; {len(train_text):,} bytes to train on, {len(held_out):,} held out; the first step compiles"
    )
    for step in range(first_step, args.steps):
        started = time.perf_counter()
        tokens, targets = random_batch(train_text, step, args, device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        loss = compiled(tokens, targets)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), args.clip)
        if log.rank == 0 and args.wire_errors_every and step % args.wire_errors_every == 0:
            log.wire_errors(step, wire_errors(model, f"layers.{step // args.wire_errors_every % len(model.layers)}.*"))
        optimizer.step()
        optimizer.zero_grad()
        log.step(step, mean_over_ranks(loss), norm, learning_rate(step, args), time.perf_counter() - started, tokens)
        if args.checkpoint_every and (step + 1) % args.checkpoint_every == 0:
            checkpoints.save(args.out, model, optimizer, step + 1)
    log.close()

    model.eval()
    log.print(f"validation loss {validate(compiled, held_out, args, device):.3f}")
    log.print("sample:", *sample(compiled, args, device).splitlines(), sep="\n    ")
    checkpoint = args.out / f"checkpoint_{args.steps}"
    if first_step == args.steps or not args.checkpoint_every or args.steps % args.checkpoint_every:
        checkpoints.save(args.out, model, optimizer, args.steps)
    log.print(f"checkpoint in {checkpoint}; to train on from it:\n    {resume_line(checkpoint, args)}")
    dist.destroy_process_group()


def make_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    betas = (0.9, 0.95)
    if args.optimizer == "muon":
        scale: Any = {"scale": "match_rms_adamw", "adamw_lr": args.lr}
        return muon(model, args.lr, weight_decay=0.1, adamw_betas=betas, **scale)
    if args.optimizer == "galore":
        rank = llama.CONFIGS[args.model].dim // 2
        settings: Any = {"refresh": 50, "scale": 1.0, "moments": args.moments}
        return galore(model, rank, args.lr, betas=betas, weight_decay=0.1, **settings)
    if args.optimizer == "ranger21":  # main() has a schedule of its own
        return Ranger21(model.parameters(), 2 * args.steps, args.lr, betas=betas, warmup=1, warmdown=args.steps)
    return torch.optim.AdamW(model.parameters(), lr=args.lr, betas=betas, weight_decay=0.1)


def mixed_precision(args: argparse.Namespace) -> MixedPrecisionPolicy:
    if args.mixed_precision == "none":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def random_batch(text: Tensor, step: int, args: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's batch of a step: a function of seed, step and rank, so that a resumed run sees the same."""
    tokens, targets = data.random_crops(text, args.batch_size, args.seq_len, args.seed, step, dist.get_rank())
    return tokens.to(device), targets.to(device)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def mean_over_ranks(value: Tensor) -> float:
    mean = value.detach().float().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


@torch.no_grad()
def validate(model: Callable[..., Tensor], text: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Mean loss in nats per byte over sequences spread evenly over ``text``, other ones on each rank."""
    batches = 8
    starts = torch.linspace(0, len(text) - args.seq_len - 1, batches * args.batch_size * dist.get_world_size()).long()
    mine = starts[dist.get_rank() :: dist.get_world_size()].split(args.batch_size)
    losses = [model(*(t.to(device) for t in data.crops(text, part, args.seq_len))) for part in mine]
    return mean_over_ranks(torch.stack(losses).mean())


@torch.no_grad()
def sample(model: Callable[..., Tensor], args: argparse.Namespace, device: torch.device, prompt: str = "def ") -> str:
    """Text drawn from the model after ``prompt``; every rank draws the same."""
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(args.sample):
        logits = model(tokens[:, -args.seq_len :])[:, -1].float()
        probabilities = torch.softmax(logits / 0.8, dim=-1).cpu()
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator).to(device)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def resume_line(checkpoint: Path, args: argparse.Namespace) -> str:
    """A command that takes the run on for as many steps again."""
    python = os.path.relpath(sys.executable)
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(dist.get_world_size())]
    more = ["--resume", str(checkpoint), "--steps", str(2 * args.steps)]  # the last of a flag counts
    return shlex.join([*launch, "-m", "examples.train", *sys.argv[1:], *more])


class Log:
    """Shows and saves the progress on rank 0: a progress bar, and a line of JSON per step."""

    def __init__(self, folder: Path, first_step: int, steps: int):
        self.rank = dist.get_rank()
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            path, part = folder / "metrics.jsonl", folder / "metrics.part"
            before = path.read_text().splitlines(keepends=True) if first_step and path.exists() else []
            # What came after the checkpoint comes again; the last line may not be whole.
            part.write_text(
                "".join(line for line in before if line.endswith("\n") and json.loads(line)["step"] < first_step)
            )
            part.replace(path)
            self.file = path.open("a", buffering=1)
            self.bar = tqdm(initial=first_step, total=steps, unit="step", dynamic_ncols=True)

    def print(self, *values: object, sep: str = " ") -> None:
        if self.rank == 0:
            tqdm.write(sep.join(map(str, values)), file=sys.stdout)

    def step(self, step: int, loss: float, norm: Tensor, lr: float, seconds: float, tokens: Tensor) -> None:
        if self.rank != 0:
            return
        tokens_per_s = tokens.numel() * dist.get_world_size() / seconds
        peak = peak_memory_bytes(tokens.device)
        metrics = {
            "step": step,
            "loss": loss,
            "grad_norm": norm.item(),
            "lr": lr,
            "step_s": seconds,
            "tokens_per_s": tokens_per_s,
            "peak_memory_bytes": peak,
        }
        self.file.write(json.dumps(metrics) + "\n")
        self.bar.set_postfix_str(
            f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s, {seconds:.3f} s/step, peak {peak / 2**30:.2f} GiB"
        )
        self.bar.update()

    def wire_errors(self, step: int, errors: Mapping[str, WireError]) -> None:
        """Show the largest errors of some parameters' weights and gradients, of this rank's shards."""
        for name, direction in (("weight", "gather"), ("gradient", "reduce")):
            found = {fqn: error for fqn, each in errors.items() if (error := getattr(each, direction)) is not None}
            if found:
                worst = max(found, key=found.__getitem__)
                self.print(f"step {step}: wire error of {name}s {found[worst]:.2%} at most ({worst})")

    def close(self) -> None:
        if self.rank == 0:
            self.bar.close()
            self.file.close()


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank so far: allocated on the GPU, or resident in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
