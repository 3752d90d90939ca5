"""GaLore: moments of gradients that are projected to a low rank, in a subspace that is found anew every some steps.

Sources: Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection" (arXiv 2403.03507); Su et
al., "GaLore 2" (arXiv 2504.20437), for the randomised search; its algorithm is that of Halko, Martinsson and Tropp,
"Finding structure with randomness" (2011), 4.4 and 5.1.
"""

import logging
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from simplefsdp.training.optimizers.matrix_optimizer import MatrixOptimizer
from simplefsdp.training.optimizers.moments import Moments, check_moments, normalised

log = logging.getLogger("simplefsdp")

_OVERSAMPLES = 8
_POWER_ITERATIONS = 2


class GaLore(MatrixOptimizer):
    """AdamW or Adafactor on the moments of projected gradients, for matrices, and AdamW for the rest, by groups.

    The gradient of a matrix of a rows and b columns is projected from the side that is shorter: to (rank, b) if a <= b,
    else to (a, rank). Its moments have that shape, and the step that they make is projected back. The projection are
    the first left, or right, singular vectors of a gradient. All state is tensors (``projection``, ``step`` and the
    moments), so a run that is resumed between two searches goes on in the same subspace. The log (``simplefsdp``,
    INFO) has the share of the gradients' energy that a search keeps.

    Args:
        params: parameters, or groups of them; trailing dims count as one.
        rank: rank of the projection; a matrix with a shorter side than that is not projected.
        lr: learning rate.
        algorithm: ``"galore"`` or ``"adamw"``.
        refresh: number of steps after which the subspace is searched again.
        scale: factor of what is projected back.
        moments: of projected gradients. ``"full"``: those of AdamW (``exp_avg`` and ``exp_avg_sq``, in the dtype of the
            parameter). ``"8bit"``: the same, each a byte and a scale for each 256; needs the package torchao.
            ``"factored"``: those of Adafactor, second moments as a column and a row (``row_var``, ``col_var``) and,
            if ``betas[0]`` is not 0, first moments of its steps (``exp_avg``).
        betas: decay of first and second moments; that of ``"factored"`` second moments is Adafactor's own.
        eps: is added to the root of the second moments; not with ``"factored"``.
        weight_decay: decoupled, multiplied by ``lr``.
        seed: of the random matrices that the search begins with; the same for every rank and parameter.

    Raises:
        ValueError: a setting is out of range; a parameter of ``"galore"`` is no real matrix.
        ImportError: ``moments`` needs a package that is not installed.
    """

    own = "galore"
    said = "GaLore projects"
    at_least_zero = ("lr", "weight_decay", "eps", "scale")
    positive = ("rank", "refresh")

    def __init__(
        self,
        params: Iterable[Any],
        rank: int,
        lr: float = 1e-3,
        *,
        algorithm: Literal["galore", "adamw"] = "galore",
        refresh: int = 200,
        scale: float = 0.25,
        moments: Moments = "full",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ):
        defaults = {
            "lr": lr,
            "algorithm": algorithm,
            "rank": rank,
            "refresh": refresh,
            "scale": scale,
            "moments": moments,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "seed": seed,
        }
        super().__init__(params, defaults)

    def check(self, group: dict[str, Any]) -> None:
        """Raise as the class says."""
        super().check(group)
        check_moments(group["moments"])

    def step_matrices(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Step the parameters of a group, and log what new subspaces keep."""
        energies = [energy for param in params if (energy := self._step_projected(param, group)) is not None]
        if energies:
            share = torch.stack(energies).mean().item()
            log.info(
                "GaLore searched %d subspaces, which keep %.1f %% of the gradients' energy", len(energies), 100 * share
            )

    def _step_projected(self, param: Tensor, group: dict[str, Any]) -> Tensor | None:
        """Step a matrix, and return the share of its gradient's energy that a new subspace keeps, if there is one."""
        gradient: Any = param.grad
        gradient = gradient.reshape(param.shape[0], -1)
        state = self.state[param]
        from_left = gradient.shape[0] <= gradient.shape[1]
        wide = gradient if from_left else gradient.mT
        rank = min(group["rank"], wide.shape[0])
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        energy = None
        if int(state["step"]) % group["refresh"] == 0:
            seed = group["seed"] + int(state["step"])
            state["projection"], energy = search_subspace(wide, rank, seed)
        state["step"] += 1
        update = state["projection"] @ normalised(state, state["projection"].mT @ wide, group)
        update = update if from_left else update.mT
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(update.reshape(param.shape), alpha=-group["lr"] * group["scale"])
        return energy


def search_subspace(matrix: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return about the first ``rank`` left singular vectors of a matrix, and the share of its squares that they keep.

    A random matrix of a few more columns is multiplied by the matrix, twice by it and its transpose, and made
    orthonormal each time; the vectors are those of the matrix seen in that basis.

    Args:
        matrix: (rows, columns), of any real floating dtype.
        rank: at most the number of rows.
        seed: of the random matrix, which is drawn on CPU.

    Returns:
        (rows, rank), orthonormal columns in the dtype of the matrix; and a 0-dim float32 tensor.
    """
    of = matrix.float()
    width = min(rank + _OVERSAMPLES, *of.shape)
    random = torch.randn(of.shape[1], width, generator=torch.Generator().manual_seed(seed)).to(of.device)
    basis = torch.linalg.qr(of @ random).Q
    for _ in range(_POWER_ITERATIONS):
        basis = torch.linalg.qr(of @ torch.linalg.qr(of.mT @ basis).Q).Q
    seen = basis.mT @ of
    vectors = basis @ torch.linalg.eigh(seen @ seen.mT).eigenvectors.flip(1)[:, :rank]
    if vectors.shape[1] < rank:  # of a matrix with fewer columns than that there are no more
        vectors = torch.nn.functional.pad(vectors, (0, rank - vectors.shape[1]))
    energy = (vectors.mT @ of).square().sum() / of.square().sum().clamp(min=1e-30)
    return vectors.to(matrix.dtype), energy
