"""Muon: momentum, orthogonalized matrix by matrix (Jordan et al., "Muon: An optimizer for hidden
layers", 2024).

With gradient G, momentum M, learning rate lr, decay wd and the Newton-Schulz iteration NS::

    M = M + (1 - momentum) (G - M)
    D = G + momentum (M - G)          with Nesterov, else D = M
    W = W (1 - lr wd) - lr ratio NS(D)

[Note: three parts of Muon] Only NS needs whole matrices. The parts before and after it are
element-wise, so each rank computes them for its shards, in any order of elements. Between the parts
an update has the dtype that NS takes, so that sending a piece of it to another rank and back does
not round it again. With torch's formula that is bfloat16, 2 bytes for an element. A step on shards
is bit-identical to one on whole matrices; test_flat_muon.py checks it.

Formulas and their sources are in muon_options.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import MatrixBlock, MatrixSpec, ParamSpec, Span
from megatron_distopt.optimizer.owners.muon_options import MuonOptions, TorchMuonOptions, options_of


def direction_of(grad: Tensor, momentum_buffer: Tensor, options: MuonOptions) -> Tensor:
    """The first part, element by element: updates the momentum in place, and returns the direction
    to orthogonalize.

    The direction has memory of its own and the dtype in which it is sent. The gradient is not
    changed.
    """
    momentum_buffer.lerp_(grad, 1 - options.momentum)
    mixed = grad.lerp(momentum_buffer, options.momentum) if options.nesterov else momentum_buffer
    return mixed.to(options.travel_dtype, copy=True)


def orthogonalize(matrix: Tensor, options: MuonOptions) -> Tensor:
    """The second part: approximately U V' of the singular value decomposition U S V', by a
    Newton-Schulz iteration.

    The matrix must be contiguous and have the dtype in which it is sent; it may be overwritten. The
    result is not contiguous if it has more rows than columns.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix  # the products are of the shorter side
    wide = options.normalized(wide, options.norm_of(wide))
    wide = newton_schulz(wide, options, lambda each: each @ each.T)
    return wide.T if is_tall else wide


def newton_schulz(
    matrix: Tensor, options: MuonOptions, gram_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """The iteration for a 2-D matrix with a norm of at most 1. `gram_of` multiplies a matrix by its
    transpose."""
    with options.matmuls():
        for a, b, c in options.coefficients:
            gram = gram_of(matrix)
            matrix = torch.addmm(
                matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a
            )
    return matrix


def orthogonalize_block(
    update: Tensor,
    spec: MatrixSpec,
    block: MatrixBlock,
    orthogonalize_one: Callable[[Tensor], Tensor],
) -> None:
    """Orthogonalizes each matrix of a block of a param, 1-D [block.in_param.numel] and contiguous,
    in place.

    `orthogonalize_one` is `orthogonalize` with options, or the same for a matrix of which other
    ranks have parts.
    """
    if len(block.shapes) == 1:
        matrices: Sequence[Tensor] = [update.view(block.shapes[0])]
    elif spec.dim == 0:
        matrices = torch.split(update.view(spec.repeats, -1, spec.cols), list(spec.sizes), dim=1)
    else:
        matrices = torch.split(update.view(spec.rows, spec.repeats, -1), list(spec.sizes), dim=2)
    for matrix, shape in zip(matrices, block.shapes, strict=True):
        # Contiguous, like a param of its own: with other strides a product may be summed in another
        # order.
        matrix.copy_(orthogonalize_one(matrix.reshape(shape).contiguous()).reshape(matrix.shape))


def apply_update(
    main: Tensor, update: Tensor, spec: MatrixSpec, in_param: Span, options: MuonOptions
) -> None:
    """The third part, element by element: decays a stretch of a param in place and adds its update.

    Both are 1-D [in_param.numel]; the update may be overwritten.
    """
    options.decay(main)
    shapes = [spec.whole(shape) for shape in spec.shapes]
    if len({options.factor(shape) for shape in shapes}) == 1:
        options.add(update, main, shapes[0])
        return
    for piece in spec.pieces(in_param):
        stretch, inside = (
            piece.in_param.relative_to(in_param.start).as_slice(),
            piece.inside.as_slices(),
        )
        target, source = (each[stretch].view(piece.sizes)[inside] for each in (main, update))
        options.add(source, target, shapes[piece.matrix])


class Muon(Optimizer):
    """Muon for whole params: bit-identical to `torch.optim.Muon`, and it supports params that hold
    several matrices.

    There is one difference. Without Nesterov and with bfloat16 gradients, torch 2.13 orthogonalizes
    the momentum in place, so that its next step continues from the orthogonalized momentum. Here
    the momentum is not changed.

    Args:
        params: as for any optimizer of torch. Each must be contiguous and have two dimensions, or
            more for a stack of matrices.
        matrices: the matrices of params that are not simply a matrix or a stack of matrices.
        options: options of `torch.optim.Muon` for all groups that do not set them.

    Raises:
        ConfigError: if an option has a value that cannot work.
        LayoutError: if a param has fewer than two dimensions or does not fit its matrices.

    >>> weight = torch.nn.Parameter(torch.eye(2, 3))
    >>> weight.grad = torch.ones(2, 3)
    >>> Muon([weight], lr=0.5, weight_decay=0.0).step()
    >>> bool((weight < torch.eye(2, 3)).all())
    True
    """

    def __init__(
        self,
        params: Iterable[Any],
        matrices: Mapping[Tensor, MatrixSpec] | None = None,
        **options: Any,
    ) -> None:
        self._matrices = dict(matrices or {})
        super().__init__(params, dict(vars(TorchMuonOptions(**options))))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_matrices": self._matrices}

    def matrices_of(self, param: Tensor) -> MatrixSpec:
        """The matrices of one of its params."""
        return self._matrices[param]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group; see the class."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        options_of(group)
        for param in group["params"]:
            self._matrices[param] = _spec_of(param, self._matrices.get(param))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every param that has a gradient.

        Args:
            closure: computes the loss and the gradients, and returns the loss.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            options = options_of(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, options)
        return loss

    def _update(self, param: Tensor, options: MuonOptions) -> None:
        grad, spec, state = param.grad, self._matrices[param], self.state[param]
        if grad is None or grad.is_sparse or torch.is_complex(grad):
            raise LayoutError(
                "Muon needs dense and real gradients, but that of one of its params is not. Use "
                "AdamW for this param."
            )
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        update = direction_of(grad, state["momentum_buffer"], options).view(-1)
        for block in spec.blocks:
            stretch = update[block.in_param.as_slice()]
            orthogonalize_block(stretch, spec, block, lambda matrix: orthogonalize(matrix, options))
        apply_update(param.view(-1), update, spec, Span(0, spec.numel), options)


def _spec_of(param: Tensor, known: MatrixSpec | None) -> MatrixSpec:
    if param.dim() < 2 or not param.is_contiguous():
        raise LayoutError(
            f"A param of Muon has shape {tuple(param.shape)} and strides {param.stride()}, but it "
            "must be contiguous and have at least two dimensions. Use AdamW for it, or call "
            "contiguous() on its data."
        )
    known = known or MatrixSpec.of(ParamSpec("param", param.numel(), tuple(param.shape)))
    if known.numel != param.numel():
        raise LayoutError(
            f"A param of Muon has {param.numel()} elements, but its matrices have {known.numel}. "
            "Give the param's own rows and columns."
        )
    return known
