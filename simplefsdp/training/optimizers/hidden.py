"""Which parameters of a model are hidden matrices, that optimizers of matrices are meant for."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

from simplefsdp.text.messages import unknown


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


def matching(option: str, pattern: str, named: Mapping[str, Tensor]) -> list[str]:
    """Return names that match a glob.

    Raises:
        ValueError: there is none; the message has the option and the nearest name.
    """
    found = [name for name in named if fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(f"{option}: {unknown('parameter', pattern, named)}")
    return found
