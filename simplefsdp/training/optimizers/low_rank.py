"""GaLore: moments of gradients that are projected to a low rank, in a subspace that is found anew every some steps.

Sources: Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection" (arXiv 2403.03507); Su et
al., "GaLore 2" (arXiv 2504.20437), for the randomised search; its algorithm is that of Halko, Martinsson and Tropp,
"Finding structure with randomness" (2011), 4.4 and 5.1.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from inductor_passes.torch_compat.distributed import is_single_process_group
from inductor_passes.torch_compat.dtensor import dtensor, local_tensor
from simplefsdp.training.optimizers.exchange import local_gradient, process_group
from simplefsdp.training.optimizers.matrix_optimizer import MatrixOptimizer
from simplefsdp.training.optimizers.moments import Moments, check_moments, normalised
from simplefsdp.training.optimizers.ownership import layout, sides

log = logging.getLogger("simplefsdp")

_OVERSAMPLES = 8
_POWER_ITERATIONS = 2


class GaLore(MatrixOptimizer):
    """AdamW or Adafactor on the moments of projected gradients, for matrices, and AdamW for the rest, by groups.

    The gradient of a matrix of a rows and b columns is projected from the side that is shorter: from the left if
    a <= b, else from the right. Moments are (rank, b), or (rank, a), and the step that they make is projected back. The
    projection are the first left, or right, singular vectors of a gradient. All state is tensors (``projection``,
    ``step`` and the moments), so a run that is resumed between two searches goes on in the same subspace. The log
    (``simplefsdp``, INFO) has the share of the gradients' energy that a search keeps.

    A ``DTensor`` that has its rows on several ranks, and more rows than columns, is stepped by rows: each rank has the
    projection, and the moments of its own rows. Nothing is communicated but in a step that searches: there each
    matrix is gathered, and searched by one rank, which sends the projection to the others.

    Args:
        params: parameters, or groups of them; trailing dims count as one.
        rank: rank of the projection; a matrix with a shorter side than that is not projected.
        lr: learning rate.
        algorithm: ``"galore"`` or ``"adamw"``.
        on: where ``distribute_optimizer`` lets sharded matrices be stepped: ``"owners"``, or ``"rows"`` where that is
            possible.
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
        ValueError: a setting is out of range; a parameter of ``"galore"`` is no real matrix; ``on="rows"`` with other
            moments than ``"full"``.
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
        on: Literal["owners", "rows"] = "owners",
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
            "on": on,
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
        if group["on"] not in ("owners", "rows"):
            raise ValueError(f"on: expected 'owners' or 'rows', found {group['on']!r}")
        if group["on"] == "rows" and group["moments"] != "full":
            raise ValueError(
                f"moments: of rows they are 'full', as others are of whole matrices, found {group['moments']!r}"
            )

    def step_matrices(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Step the parameters of a group, and log what new subspaces keep."""
        for param in params:
            if not self.state[param]:
                self.state[param]["step"] = torch.zeros((), dtype=torch.float32)
        due = [param for param in params if int(self.state[param]["step"]) % group["refresh"] == 0]
        energies = [self._search(param, param.grad, group) for param in due if not _by_rows(param, group)]
        energies += self._search_for_all([param for param in due if _by_rows(param, group)], group)
        for param in params:
            self._step_projected(param, group)
        if energies:
            share = torch.stack(energies).mean().item()
            log.info(
                "GaLore searched %d subspaces, which keep %.1f %% of the gradients' energy", len(energies), 100 * share
            )

    def _search(self, param: Tensor, gradient: Any, group: dict[str, Any]) -> Tensor:
        """Search the subspace of a whole gradient, and return the share of its energy that is kept."""
        rows, columns = sides(param.shape)
        matrix = gradient.reshape(rows, columns)
        seed = group["seed"] + int(self.state[param]["step"])
        found, energy = search_subspace(matrix if rows <= columns else matrix.mT, _rank(param, group), seed)
        self.state[param]["projection"] = found.contiguous()
        return energy

    def _search_for_all(self, params: Sequence[Any], group: dict[str, Any]) -> list[Tensor]:
        """Search the subspaces of matrices that are stepped by rows: as many at once as there are ranks, one on each.

        An error of a search is raised once the other ranks have what they wait for.
        """
        energies: list[Tensor] = []
        failure: Exception | None = None
        for searched in _one_for_each_rank(params):
            mine: tuple[Any, Tensor] | None = None
            for rank, param in searched.items():
                gradient = param.grad.full_tensor().to(param.dtype)
                if rank == dist.get_rank():
                    mine = param, gradient
                self.state[param]["projection"] = gradient.new_zeros(sides(param.shape)[1], _rank(param, group))
            if mine is not None:
                try:
                    energies.append(self._search(*mine, group))
                except Exception as error:
                    failure = error
            for rank, param in searched.items():
                ranks = process_group(param.device_mesh)
                if not is_single_process_group(ranks.group_name):
                    dist.broadcast(self.state[param]["projection"], rank, ranks)
        if failure is not None:
            raise failure
        return energies

    def _step_projected(self, param: Tensor, group: dict[str, Any]) -> None:
        """Step a matrix, or this rank's rows of one, in the subspace that its state has."""
        by_rows = _by_rows(param, group)
        values: Any = local_tensor(param) if by_rows else param
        gradient: Any = local_gradient(param) if by_rows else param.grad
        gradient = gradient.reshape(sides(values.shape))
        rows, columns = sides(param.shape)
        wide = gradient if rows <= columns else gradient.mT
        state = self.state[param]
        state["step"] += 1
        local = {key: local_tensor(value) for key, value in state.items()} if by_rows else state
        update = local["projection"] @ normalised(local, local["projection"].mT @ wide, group)
        update = update if rows <= columns else update.mT
        values.mul_(1 - group["lr"] * group["weight_decay"])
        values.add_(update.reshape(values.shape), alpha=-group["lr"] * group["scale"])
        for key, value in local.items():  # in the same order on every rank, as torch gathers state in its order
            if key not in state:
                state[key] = _of_columns(param, value, rows)


def has_rows(param: Any) -> bool:
    """Return whether ranks have whole rows of a parameter that GaLore projects from the right: it is stepped by rows.

    Parameters that are kept on another device than that of their mesh are not.
    """
    if not isinstance(param, DTensor):
        return False
    rows, columns = sides(param.shape)
    split = [placement for placement in param.placements if not isinstance(placement, Replicate)]
    by_rows = len(split) == 1 and type(split[0]) is Shard and split[0].dim == 0
    return by_rows and rows > columns and param._local_tensor.device.type == param.device_mesh.device_type


def _by_rows(param: Tensor, group: dict[str, Any]) -> bool:
    """Return whether this rank steps its rows of a parameter, whatever place a loaded group's settings name."""
    return has_rows(param) and group["moments"] == "full"


def _rank(param: Tensor, group: dict[str, Any]) -> int:
    return min(group["rank"], *sides(param.shape))


def _one_for_each_rank(params: Sequence[Any]) -> Iterator[dict[int, Any]]:
    """Yield parameters by the rank that searches them, as many at once as a mesh has ranks."""
    by_mesh: dict[Any, list[Any]] = {}
    for param in params:
        by_mesh.setdefault(param.device_mesh, []).append(param)
    for members in by_mesh.values():
        ranks = layout(members[0]).ranks
        for first in range(0, len(members), len(ranks)):
            yield dict(zip(ranks, members[first : first + len(ranks)], strict=False))


def _of_columns(param: Any, local: Tensor, columns: int) -> DTensor:
    """Return moments (rank, columns here) as parts of those of all rows of a parameter, which are their columns."""
    placements = tuple(Shard(1) if isinstance(each, Shard) else each for each in param.placements)
    return dtensor(local, param.device_mesh, placements, torch.Size((local.shape[0], columns)))


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
