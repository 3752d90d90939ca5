"""The example model is Llama 3."""

import pytest
import torch
from torch import nn

from simplefsdp.models.llama import CONFIGS, Llama, Rope, rope_frequencies
from tests.models import tiny_llama

PARAMETERS = {
    "1B": 1_235_814_400,
    "3B": 3_212_749_824,
    "8B": 8_030_261_248,
    "70B": 70_553_706_496,
    "405B": 405_853_388_800,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_parameter_counts(name):
    with torch.device("meta"):
        assert sum(p.numel() for p in Llama(CONFIGS[name]).parameters()) == PARAMETERS[name]


def test_every_config_is_counted_or_for_debugging():
    assert set(CONFIGS) == {"debug", "small", *PARAMETERS}


def test_a_position_sees_no_later_one():
    model = tiny_llama()
    tokens = torch.arange(12).remainder(30)[None]
    changed = tokens.clone()
    changed[0, 7:] = 3
    torch.testing.assert_close(model(tokens)[:, :7], model(changed)[:, :7])
    assert not torch.allclose(model(tokens)[:, 7:], model(changed)[:, 7:])


def test_rotation_depends_on_the_distance_only_and_keeps_lengths():
    rope = Rope(CONFIGS["debug"])
    q, k = torch.randn(2, 1, 1, 1, 16).unbind()
    scores = []
    for offset in (0, 5):
        rotated_q = rope(q.expand(1, 10, 1, 16))[0, 3 + offset, 0]
        rotated_k = rope(k.expand(1, 10, 1, 16))[0, 1 + offset, 0]
        scores.append(rotated_q @ rotated_k)
        torch.testing.assert_close(rotated_q.norm(), q.norm())
    torch.testing.assert_close(scores[0], scores[1])


def test_scaling_keeps_short_wavelengths_and_divides_long_ones_by_eight():
    scaled = rope_frequencies(CONFIGS["8B"])
    plain = 500000.0 ** (-torch.arange(0, 128, 2) / 128)
    turns = 8192 * plain / (2 * torch.pi)
    torch.testing.assert_close(scaled[turns > 4], plain[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.parametrize("kind", ["block", "selective"])
def test_activation_checkpointing_saves_less_and_gives_the_same_gradients(kind):
    results = []
    for checkpointing in ("none", kind):
        model: nn.Module = tiny_llama(activation_checkpointing=checkpointing)
        tokens = torch.arange(2 * 16).remainder(30).view(2, 16)
        saved = CountSaved()
        with saved:
            loss = model(tokens, tokens)
        loss.backward()
        results.append((saved.numel, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[0][1], results[1][1])
    assert results[1][0] < results[0][0]


class CountSaved(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self):
        self.numel = 0
        super().__init__(self.count, lambda tensor: tensor)

    def count(self, tensor):
        self.numel += tensor.numel()
        return tensor
