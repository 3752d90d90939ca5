"""``simplefsdp compare``: train a model along a ladder of systems, and say where its numbers first differ.

    simplefsdp compare --model llama3-debug --ranks 2 --layers 2

The ranks are processes of this machine. Each rung is compared with the one before: a single process, FSDP2,
``simple_fsdp`` in eager mode, traced, with merged collectives, with collectives ahead of their use, and with fused
kernels. The command fails if a rung is further from the one before than promised: on a CPU with one or two ranks the
rungs from FSDP2 to ordered collectives have the same bits, where no parameter is read twice; all others agree within a
tolerance.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from simplefsdp.analysis.ladder import LADDER, Comparison, Difference, Training, climb
from simplefsdp.rehearsal.systems import cross_entropy
from simplefsdp.rehearsal.workload import MODELS, imported, model_factory
from simplefsdp.text.messages import unknown
from simplefsdp.text.tables import markdown_table

RUNGS = tuple(rung.name for rung in LADDER)
TOLERANCES = {"fp32": 1e-4, "bf16": 0.1}
"""Bounds of relative differences to rounding, by the dtype of compute."""
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], float]] = {
    "sgd": (torch.optim.SGD, 0.05),
    "adamw": (torch.optim.AdamW, 1e-3),
}
"""Optimizers and their learning rates, where none is given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help=f"{', '.join(MODELS)}, or package.module:factory")
    add("--inputs", help="package.module:function, of a torch.Generator: the model's arguments (default: tokens)")
    add("--ranks", type=int, default=2, help="processes of this machine")
    add("--rungs", default=",".join(RUNGS), help=f"in this order (default: {','.join(RUNGS)})")
    add("--steps", type=int, default=5)
    add("--optimizer", default="sgd", choices=OPTIMIZERS)
    add("--lr", type=float, help="learning rate (default: 0.05, of adamw 0.001)")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--seq", type=int, default=64, help="tokens of a sequence")
    add("--batch", type=int, default=1, help="sequences of a rank and step")
    add("--layers", type=int, help="how many blocks, instead of the model's own number")
    add("--activation-checkpointing", default="none", choices=["none", "block", "selective"])
    add("--dtype", default="fp32", choices=TOLERANCES, help="of compute and gathers")
    add("--tolerance", type=float, help="for rungs that agree to rounding (default: 1e-4, in bf16 0.1)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Train along the ladder, and print a row for each rung.

    Raises:
        ValueError: an argument is not valid, before any process starts.
        SystemExit: a rung raised, or is further from the one before than promised.
    """
    for name in ("ranks", "steps", "seq", "batch"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}: expected a positive number, found {getattr(args, name)}")
    rungs = [name.strip() for name in args.rungs.split(",")]
    for name in rungs:
        if name not in RUNGS:
            raise ValueError("--rungs: " + unknown("rung", name, RUNGS))
    if len(rungs) < 2:
        raise ValueError("--rungs: expected two or more, the first is what the second is compared with")
    if args.device == "cuda" and args.ranks > torch.cuda.device_count():
        raise ValueError(
            f"--ranks: {args.ranks}, but torch sees {torch.cuda.device_count()} GPUs here; or --device cpu"
        )
    if args.inputs is not None:
        imported("--inputs", args.inputs)
    else:
        with torch.device("meta"):
            vocab_size = _vocab_size(_build(args)())
        if vocab_size is None:
            raise ValueError(f"--model {args.model}: its config has no vocab_size; --inputs makes other inputs")
    tolerance = TOLERANCES[args.dtype] if args.tolerance is None else args.tolerance
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (vars(args), rungs, folder), nprocs=args.ranks, start_method="spawn")
        results = json.loads((Path(folder) / "results.json").read_text())
    compared = [_read(result) for result in results["compared"]]
    failed: dict[str, str] = results["failed"]
    passed = not failed and all(one.passed(tolerance) for one in compared)
    if args.json:
        print(json.dumps(results | {"tolerance": tolerance, "passed": passed}, indent=2))
    else:
        print(_heading(args), "", table(compared, tolerance), sep="\n")
        for name, words in failed.items():
            print(f"\n{name} does not run: {words}")
    if not passed:
        sys.exit(1)


def table(compared: Sequence[Comparison], tolerance: float) -> str:
    """Return a row for each comparison, in Markdown."""
    rows = []
    for one in compared:
        verdict = "the same bits" if one.first is None else "to rounding" if one.passed(tolerance) else "DIFFERENT"
        promised = "bits" if one.keeps_bits else f"within {tolerance:g}"
        rows.append([one.rung, one.against, promised, verdict, _words(one.first), _words(one.largest)])
    return markdown_table(["rung", "against", "promised", "found", "first difference", "largest difference"], rows)


def _words(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    if difference.ulps < 0:
        return f"step {difference.step}, {difference.label}: only one of both has it"
    return f"step {difference.step}, {difference.label}: {difference.relative:.1e}, {difference.ulps} ulps at most"


def _heading(args: argparse.Namespace) -> str:
    return (
        f"{args.model}, {args.ranks} ranks ({args.device}, torch {torch.__version__}), {args.steps} steps of "
        f"{args.optimizer} with {_learning_rate(args):g}, {args.dtype}, seed {args.seed}\neach rung against the one "
        "before; differences as norm of the difference by norm of the tensor, and in numbers that can be represented "
        "between two elements (ulps)"
    )


def _read(result: dict[str, Any]) -> Comparison:
    first, largest = (Difference(**one) if one else None for one in (result["first"], result["largest"]))
    return Comparison(result["rung"], result["against"], result["keeps_bits"], first, largest)


def _rank(rank: int, arguments: dict[str, Any], rungs: Sequence[str], folder: str) -> None:
    """Climb as one rank, and on the first write the results."""
    args = argparse.Namespace(**arguments)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(1)
    torch._inductor.config.fallback_random = True  # dropout has the bits of eager mode
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(args.ranks)
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if args.device == "cuda" else "gloo"
    store = dist.FileStore(str(Path(folder) / "store"), args.ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=args.ranks)
    compared: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for result in climb(_training(args), [rung for name in rungs for rung in LADDER if rung.name == name]):
        if isinstance(result, Comparison):
            differences = {name: one and one._asdict() for name, one in zip(_ENDS, result[-2:], strict=True)}
            compared.append(result._asdict() | differences)
        else:
            failed.update([result])
        if rank == 0:
            print(f"{compared[-1]['rung'] if isinstance(result, Comparison) else result[0]}: done", file=sys.stderr)
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps({"compared": compared, "failed": failed}))
    dist.barrier()
    dist.destroy_process_group()


_ENDS = ("first", "largest")


def _build(args: argparse.Namespace) -> Callable[[], nn.Module]:
    return model_factory(
        args.model, seq=args.seq, layers=args.layers, activation_checkpointing=args.activation_checkpointing
    )


def _vocab_size(model: nn.Module) -> Any:
    return getattr(getattr(model, "config", None), "vocab_size", None)


def _training(args: argparse.Namespace) -> Training:
    torch.manual_seed(args.seed)
    model = _build(args)().to(args.device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.dtype == "bf16" else MixedPrecisionPolicy()
    own_inputs = None if args.inputs is None else imported("--inputs", args.inputs)
    vocab_size = _vocab_size(model)

    def inputs(step: int, rank: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(1_000_003 * args.seed + args.ranks * step + rank)
        if own_inputs is None:
            tokens = torch.randint(vocab_size, (args.batch, args.seq + 1), generator=generator).to(args.device)
            return tokens[:, :-1], tokens[:, 1:]
        found = own_inputs(generator)
        given = found if isinstance(found, tuple) else (found,)
        return tuple(x.to(args.device) if isinstance(x, Tensor) else x for x in given)

    loss = _loss_of_tokens if own_inputs is None else _loss_of_output
    optimizer = functools.partial(OPTIMIZERS[args.optimizer][0], lr=_learning_rate(args))
    return Training(model, inputs, loss, args.steps, optimizer, init_device_mesh(args.device, (args.ranks,)), policy)


def _learning_rate(args: argparse.Namespace) -> float:
    return OPTIMIZERS[args.optimizer][1] if args.lr is None else float(args.lr)


def _loss_of_tokens(forward: Callable[..., Any], tokens: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(forward(tokens), targets)


def _loss_of_output(forward: Callable[..., Any], *inputs: Any) -> Tensor:
    """Return the model's output if it is a number, else the mean of its squares."""
    output = forward(*inputs)
    return output if output.ndim == 0 else output.float().square().mean()
