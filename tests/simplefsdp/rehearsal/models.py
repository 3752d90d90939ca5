"""Models for ``simplefsdp rehearse --model``."""

from types import SimpleNamespace

from torch import Tensor, nn


class Tagger(nn.Module):
    """Scores of every token by itself, without a ``config`` that says how large it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.embedding, self.scores = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.scores(x)


class Named(Tagger):
    config = SimpleNamespace(vocab_size=12)


class WithLogits(Named):
    """Output as HuggingFace's models give it."""

    def forward(self, tokens: Tensor) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(logits=super().forward(tokens))
