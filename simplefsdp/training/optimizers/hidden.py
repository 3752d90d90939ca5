"""Which parameters of a model are hidden matrices, that optimizers of matrices are meant for."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from simplefsdp.text.messages import matching
from simplefsdp.training.optimizers.ownership import sides


def hidden_matrices(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, of named parameters, those of two dims or more that are neither embedding nor output layer.

    Output layers are matrices of the shape of an embedding that are in no numbered block, or the last of the model.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    embedded = {id(param) for module in embeddings for param in module._parameters.values()}
    shapes = {(module.num_embeddings, module.embedding_dim) for module in embeddings}
    matrices = {name: param for name, param in named.items() if param.ndim > 1 and param.is_floating_point()}
    last = next(reversed(matrices), None)

    def is_output(name: str) -> bool:
        in_block = any(part.isdigit() for part in name.split("."))
        return tuple(matrices[name].shape) in shapes and (name == last or not in_block)

    return {name: param for name, param in matrices.items() if id(param) not in embedded and not is_output(name)}


def split_parameters(
    model: nn.Module, adamw: Sequence[str], shortest_side: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the hidden matrices of a model that are to be trained, and what AdamW is to step, by name.

    Args:
        model: the model.
        adamw: patterns (globs) of more parameters for AdamW.
        shortest_side: a matrix with a shorter side is for AdamW too.

    Raises:
        TypeError: ``model`` is no module, or ``adamw`` is no list.
        ValueError: a pattern names no parameter.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    if isinstance(adamw, str):
        raise TypeError(f"adamw: expected a list of patterns, found {adamw!r}")
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    others = {name for pattern in adamw for name in matching("adamw", "parameter", pattern, named)}
    hidden = {
        name: param
        for name, param in hidden_matrices(model, named).items()
        if name not in others and min(sides(param.shape)) >= shortest_side
    }
    return hidden, {name: param for name, param in named.items() if name not in hidden}
