"""The operator that makes the gradient of an embedding's weight: the rows that belong to one token are added up.

TorchInductor's own decomposition adds by atomics, in another order in each run, and ``embedding_dense_backward`` lets
the host wait for a GPU. Sums are in float32 here, and have the same bits in each run.
"""

import torch
from torch import Tensor

from inductor_passes.ops.pack import LIBRARY


def add_rows(rows: Tensor, tokens: Tensor, count: int, padding_idx: int) -> Tensor:
    """Return (``count``, columns): row ``t`` is the sum of those ``rows``, (tokens, columns), whose token is ``t``.

    The result is in float32, or in the dtype of ``rows`` if that is wider. The row ``padding_idx`` is 0; -1: none is.
    """
    rows = rows.to(_of_sum(rows))
    if not rows.is_cuda:
        result: Tensor = torch.ops.aten.embedding_dense_backward(rows, tokens, count, padding_idx, False)
        return result
    if padding_idx >= 0:
        rows = rows.masked_fill((tokens == padding_idx).unsqueeze(1), 0)
    return rows.new_zeros(count, rows.shape[1]).index_put_([tokens], rows, accumulate=True)


def _of_sum(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


LIBRARY.define(
    "add_rows(Tensor rows, Tensor tokens, SymInt count, int padding_idx) -> Tensor", tags=(torch.Tag.flexible_layout,)
)
LIBRARY.impl("add_rows", add_rows, "CompositeExplicitAutograd")
torch.library.register_fake(
    "simplefsdp::add_rows",
    lambda rows, _tokens, count, _padding_idx: rows.new_empty(count, rows.shape[1], dtype=_of_sum(rows)),
    lib=LIBRARY,
)

ADD_ROWS = torch.ops.simplefsdp.add_rows.default
