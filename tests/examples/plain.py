"""The training of the examples, in one process and without the feature that each example shows."""

import torch
from torch import Tensor, nn

from examples import data

SEQ_LEN = 32
FLAGS = ["--batch-size", "2", "--accumulate", "2", "--seq-len", str(SEQ_LEN), "--lower-with", "aot_eager"]
"""On two ranks: eight sequences a step, of which the last four are the last batch."""


def train(model: nn.Module, order: Tensor) -> list[float]:
    """On sequences in this order; the loss of the last batch of each step."""
    text, _ = data.load(None, SEQ_LEN)
    tokens, targets = (part[order] for part in data.random_crops(text, int(order.max()) + 1, SEQ_LEN, 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    losses = []
    for first in range(0, len(order), 8):
        model(tokens[first : first + 8], targets[first : first + 8]).backward()
        with torch.no_grad():
            losses.append(model(tokens[first + 4 : first + 8], targets[first + 4 : first + 8]).item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses
