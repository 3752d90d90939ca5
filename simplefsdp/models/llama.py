"""Llama 3 (arXiv 2407.21783): RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.

A plain PyTorch model: it knows nothing of sharding. ``Llama.parallelize`` makes it tensor parallel, by torch's means.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


@dataclass(frozen=True)
class LlamaConfig:
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab_size: int = 128256
    tie_embeddings: bool = False
    max_seq_len: int = 8192
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: bool = True
    """Stretch long wavelengths as Llama 3.1 does, from 8192 positions to 131072."""
    activation_checkpointing: str = "none"
    """Activations that backward recomputes: ``"none"``; ``"block"``: all but the blocks' inputs; ``"selective"``: all
    but matmuls and attention."""

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


CONFIGS = {
    "debug": LlamaConfig(128, 4, 8, 4, 384, vocab_size=256, max_seq_len=1024, rope_theta=10000.0, rope_scaling=False),
    "small": LlamaConfig(256, 6, 8, 4, 768, vocab_size=256, max_seq_len=1024, rope_theta=10000.0, rope_scaling=False),
    "1B": LlamaConfig(2048, 16, 32, 8, 8192, tie_embeddings=True),
    "3B": LlamaConfig(3072, 28, 24, 8, 8192, tie_embeddings=True),
    "8B": LlamaConfig(4096, 32, 32, 8, 14336),
    "70B": LlamaConfig(8192, 80, 64, 8, 28672),
    "405B": LlamaConfig(16384, 126, 128, 8, 53248),
}


class Rope(nn.Module):
    """Rotary position embedding of adjacent pairs (arXiv 2104.09864), in float32."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.register_buffer("cos", torch.empty(config.max_seq_len, config.head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(config.max_seq_len, config.head_dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the tables (needed again after ``to_empty``)."""
        positions = torch.arange(self.config.max_seq_len, device=self.cos.device).float()
        angles = torch.outer(positions, rope_frequencies(self.config).to(self.cos.device))
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """Rotate ``x`` of shape (batch, seq, heads, head_dim) by its positions 0 .. seq-1."""
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.cos[: x.shape[1], None], self.sin[: x.shape[1], None]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)


def rope_frequencies(config: LlamaConfig) -> Tensor:
    """Return the radians per position of each pair, shape (head_dim / 2,)."""
    frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    if not config.rope_scaling:
        return frequencies
    factor, low, high, original_length = 8.0, 1.0, 4.0, 8192
    turns = original_length * frequencies / (2 * math.pi)
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)  # 1: short wavelength, as it is; 0: long, divided by factor
    return frequencies * (unscaled + (1 - unscaled) / factor)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, rope: Rope):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)
        self.rope = rope

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (self.rope(q), self.rope(k), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, rope: Rope):
        super().__init__()
        self.attention = Attention(config, rope)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.rope = Rope(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, self.rope) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters()
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def reset_parameters(self) -> None:
        """Draw normal weights, std 0.02; smaller where a residual branch ends, by the square root of their number."""
        for name, param in self.named_parameters():
            if param.ndim > 1:
                ends_branch = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * self.config.layers) if ends_branch else 0.02)
            else:
                nn.init.ones_(param)
        self.rope.reset_parameters()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (batch, seq, vocab) of ``tokens`` (batch, seq); with ``targets`` the mean loss in nats."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = self._call_checkpointed(layer, x)
        logits = self.output(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def parallelize(self, mesh: DeviceMesh, loss_parallel: bool = False) -> None:
        """Make the model tensor and sequence parallel over a 1-D mesh, in place and before ``simple_fsdp`` over others.

        Each rank computes some of the heads, of the feed-forward's channels and of the vocabulary, and between them,
        where norms and residuals are, a part of the sequence. Inputs and outputs are whole; with ``loss_parallel`` the
        logits are a ``DTensor`` of which each rank has some words, for a loss (and its backward) inside of
        ``torch.distributed.tensor.parallel.loss_parallel()``: whole logits are then nowhere.

        Raises:
            ValueError: heads, channels or words cannot be dealt evenly.

        Source: sequence parallelism (arXiv 2205.05198); ``torch.distributed.tensor.parallel``.
        """
        config, ranks = self.config, mesh.size()
        for name in ("kv_heads", "heads", "ffn_dim", "vocab_size"):
            if getattr(config, name) % ranks:
                raise ValueError(f"mesh: {name} = {getattr(config, name)} cannot be dealt evenly to {ranks} ranks")
        whole, part = Replicate(), Shard(1)

        def gathered() -> ParallelStyle:
            return PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,))

        def rows() -> ParallelStyle:
            return RowwiseParallel(output_layouts=part)

        block: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": gathered(),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": rows(),
            "ffn_norm": SequenceParallel(),
            "feed_forward": gathered(),
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
            "feed_forward.w2": rows(),
        }
        ends: dict[str, ParallelStyle] = {
            "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=part),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=part,
                output_layouts=Shard(-1) if loss_parallel else whole,
                use_local_output=not loss_parallel,
            ),
        }
        parallelize_module(self, mesh, ends)
        for layer in self.layers:
            parallelize_module(layer, mesh, block)
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def _call_checkpointed(self, layer: nn.Module, x: Tensor) -> Tensor:
        kind = self.config.activation_checkpointing
        if kind == "none" or not torch.is_grad_enabled():
            return layer(x)
        if kind == "selective":
            return checkpoint(layer, x, use_reentrant=False, context_fn=_save_matmuls)
        return checkpoint(layer, x, use_reentrant=False)


def _save_matmuls():
    aten = torch.ops.aten
    saved = [
        aten.mm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ]
    return create_selective_checkpoint_contexts(saved)


def build(name: str, **changes) -> Llama:
    """Return the Llama of ``CONFIGS[name]`` with some fields of its configuration changed."""
    return Llama(replace(CONFIGS[name], **changes))
