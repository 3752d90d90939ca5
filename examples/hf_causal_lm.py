"""Train a causal language model of HuggingFace transformers with simplefsdp.

    torchrun --standalone --nproc-per-node 2 -m examples.hf_causal_lm --model PATH --out out/hf

``PATH`` is a local folder as ``save_pretrained`` writes it; nothing is downloaded, and without weights there, they are
drawn. ``--out`` becomes such a folder too.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from simplefsdp import clip_grad_norm_, full_state_dict, simple_fsdp

from . import data


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="examples.hf_causal_lm", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder with config.json, and weights and tokenizer if there are any")
    add("--out", type=Path, required=True, help="folder for the trained model")
    add("--data", metavar="PATH_OR_GLOB", help="text to train on (default: Python's standard library)")
    add("--steps", type=int, default=100)
    add("--batch-size", type=int, default=4, help="sequences per rank and step")
    add("--seq-len", type=int, default=256, help="tokens per sequence")
    add("--lr", type=float, default=1e-4)
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--seed", type=int, default=0)
    add("--bf16", action="store_true", help="compute and gather in bfloat16")
    add("--lower-with", choices=["inductor", "aot_eager"], default="inductor")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: no config.json there")
    return args


def main() -> None:
    args = parse_arguments()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(args.seed)

    whole = load_whole(args.model) if dist.get_rank() == 0 else None
    model = shard(args, whole, device)
    compiled = torch.compile(model, backend="simplefsdp", options={"lower_with": args.lower_with})
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    text = tokens_of(args)
    losses = []
    with tqdm(total=args.steps, unit="step", disable=dist.get_rank() != 0) as bar:
        for step in range(args.steps):
            tokens, _ = data.random_crops(text, args.batch_size, args.seq_len, args.seed, step, dist.get_rank())
            tokens = tokens.to(device)
            loss = compiled(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            bar.set_postfix_str(f"loss {losses[-1]:.3f}")
            bar.update()
    state = full_state_dict(model)
    if whole is not None:
        whole.load_state_dict(state)
        whole.save_pretrained(args.out)
        if (tokenizer := tokenizer_of(args.model)) is not None:
            tokenizer.save_pretrained(args.out)
        print(f"losses {' '.join(f'{loss:.3f}' for loss in losses[:1] + losses[-1:])}; saved in {args.out}")
    dist.destroy_process_group()


def load_whole(path: Path) -> Any:
    """The model on CPU, its weights from ``path`` if there are any."""
    if any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)


def shard(args: argparse.Namespace, whole: nn.Module | None, device: torch.device) -> Any:
    """The model, of which only rank 0 has the values: it sends them on, one parameter at a time, and no other rank ever
    holds all of it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=torch.float32)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    simple_fsdp(model, mp_policy=policy)
    model.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole.state_dict() if whole is not None else {}, options=options)
    values = dict(whole.named_buffers()) if whole is not None else {}
    for name, buffer in model.named_buffers():  # those that no state dict has, too
        if name in values:
            buffer.copy_(values[name])
        dist.broadcast(buffer, src=0)
    return model.train()


def tokenizer_of(path: Path) -> Any:
    """Return the tokenizer in the folder of a checkpoint; ``None`` if the folder has none."""
    if not any(file for kind in ("tokenizer*", "vocab*", "*.model") for file in path.glob(kind)):
        return None
    return AutoTokenizer.from_pretrained(path)


def tokens_of(args: argparse.Namespace) -> Tensor:
    """The text by the model's tokenizer, or byte by byte if it has none."""
    text, _ = data.load(args.data, args.seq_len)
    if (tokenizer := tokenizer_of(args.model)) is None:
        return text
    return torch.tensor(tokenizer(bytes(text.tolist()).decode(errors="replace"))["input_ids"])


if __name__ == "__main__":
    main()
