"""Why is the step slow? From a third of it exposed to almost none, by what a report says.

    python -m examples.debug_schedule

One rank of eight trains a small Llama; the other seven and the network between them are a model (a rehearsal), so this
needs no cluster. Each time the step is compiled with another plan, measured, and explained; the last lines of a screen
say what to try next. The first run measures this machine, once, in a minute.
"""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from simplefsdp import HardwareProfile, measure, rehearsal, simple_fsdp
from simplefsdp.calibration.calibrate import calibrated_profile
from simplefsdp.cli.explain import read
from simplefsdp.hardware.profile import flat
from simplefsdp.models import llama

NETWORK = flat("eight machines on a shared link", 8, alpha_s=0.5e-3, bandwidth_bytes_per_s=0.6e9)
TRIES = {
    "none": "each weight gathered where it is used",
    "block": "a bucket for each block, one ahead",
    "auto": "what the planner finds",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="examples.debug_schedule", description="From a third exposed to almost none.")
    parser.add_argument("--out", type=Path, default=Path("out/debug_schedule"), help="folder for the reports")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the other core is the network
    logging.getLogger("simplefsdp").setLevel(logging.ERROR)
    profile = calibrated_profile(torch.device("cpu"), NETWORK)
    for i, (plan, what) in enumerate(TRIES.items()):
        folder = args.out / f"{i}_{plan}"
        with rehearsal.world(NETWORK.ranks, NETWORK):
            found = measure(compiled_step(profile, folder, plan), steps=5)
        print(f"\n{i}. plan={plan!r}, {what}")
        print(f"   measured: {1e3 * found.step_s:.0f} ms a step, {found.exposed_s / found.step_s:.1%} of it exposed")
        if plan != "none":
            (explanation,) = read(folder).values()
            print(explanation.text(rows=3))
    print(f"reports in {args.out}; in pictures: simplefsdp explain {folder}")


def compiled_step(profile: HardwareProfile, folder: Path, plan: str) -> Callable[[], None]:
    """A training step that has been compiled and run."""
    torch.manual_seed(0)
    model = llama.build("debug", vocab_size=256, dim=512, layers=4, heads=8, kv_heads=4, ffn_dim=1536)
    simple_fsdp(model)
    torch._dynamo.reset()
    options: Any = {"plan": plan, "profile": profile, "report_dir": folder}
    forward = torch.compile(model, backend="simplefsdp", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(256, (1, 257))

    def step() -> None:
        forward(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return step


if __name__ == "__main__":
    main()
