r"""Sizes of a network's weights as operators: how far each part can stretch a difference.

Everything is in float64 and by head or block; :math:`\|\cdot\|` is the largest singular value.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nohair.lab import anatomy

Array = NDArray[np.float64]


def norm(weight: Tensor) -> Array:
    """Norms of one matrix (out, in), or of a stack of them, by the smaller Gram matrix."""
    w = _double(weight)
    gram = w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w
    largest: Array = torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0).sqrt().cpu().numpy()
    return largest


def product_norm(writer: Tensor, value: Tensor) -> Array:
    r"""Norms :math:`\|W_O W_V\|` by head, without making the products, which are width × width.

    Parameters
    ----------
    writer, value
        Of shape (heads, width, head width) and (key heads, head width, width).
    """
    triangle = torch.linalg.qr(_double(value).mT, mode="r").R
    return norm(_double(writer) @ triangle.mT.repeat_interleave(len(writer) // len(value), 0))


def lipschitz_of_norm(model: Any, module: nn.Module, smallest: float) -> float:
    r"""Lipschitz constant of a norm among states whose rms (or deviation) is at least `smallest`.

    :math:`\nu = \max|\gamma| / \sqrt{r^2 + \epsilon}`.
    """
    gain, _, epsilon = anatomy.gain(model, module)
    square = smallest**2 + epsilon
    return float(gain.abs().max()) / sqrt(square) if square > 0 else inf


def largest_output(model: Any, module: nn.Module, width: int) -> float:
    r"""Norm that nothing which leaves a norm exceeds: :math:`\sqrt d \max|\gamma| + |\beta|`."""
    gain, bias, _ = anatomy.gain(model, module)
    offset = 0.0 if bias is None else float(torch.linalg.vector_norm(_double(bias)))
    return sqrt(width) * float(gain.abs().max()) + offset


def lipschitz_of_mlp(
    family: anatomy.Family, block: nn.Module, low: float, high: float, up: float
) -> float:
    r"""Lipschitz constant of a block's MLP among inputs that keep to what was seen.

    Plain: :math:`\|W_2\| \sup|\varphi'| \|W_1\|`. Gated, since :math:`\varphi(a) b - \varphi(a') b'
    = (\varphi(a) - \varphi(a')) b + \varphi(a') (b - b')`:
    :math:`\|W_2\| (\sup|\varphi'| \|W_a\| \sup|b|_\infty + \sup|\varphi| \|W_b\|)`.

    Parameters
    ----------
    family, block
        Where the matrices are.
    low, high
        Between which the activation's inputs lie.
    up
        Largest entry of what a gate multiplies.
    """
    steepest, largest = activation_range(block.get_submodule(family.activation), low, high)
    read = [float(norm(anatomy.matrix(block.get_submodule(path)))) for path in family.readers]
    writer = float(norm(anatomy.matrix(block.get_submodule(family.residual_writers[1]))))
    if len(read) == 1:
        return writer * steepest * read[0]
    return writer * (steepest * read[0] * up + largest * read[1])


def activation_range(activation: Any, low: float, high: float) -> tuple[float, float]:
    """Largest slope and size of an activation between two inputs.

    On a grid of 20,001 points from end to end and another within ten of zero, where activations
    bend. Between two points there a slope rises by less than 1e-4 of its largest; that is added.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        ends = (low, high), (min(max(low, -10.0), high), max(min(high, 10.0), low))
        grids = [torch.linspace(*pair, 20_001, dtype=torch.float64) for pair in ends]
        at = torch.cat(grids).requires_grad_()
        values = activation(at)
        (slopes,) = torch.autograd.grad(values.sum(), at)
    return 1.0001 * float(slopes.abs().max()), float(values.detach().abs().max())


def largest_row(weight: Tensor) -> float:
    """Largest norm of a matrix's rows: how far one entry of its output can move."""
    return float(torch.linalg.vector_norm(_double(weight), dim=-1).max())


def lengths(bias: Tensor | None, heads: int) -> Array:
    """Norms of a bias by head; zero without."""
    if bias is None:
        return np.zeros(heads)
    found: Array = torch.linalg.vector_norm(_double(bias), dim=-1).cpu().numpy()
    return found


def _double(weight: Tensor) -> Tensor:
    """To float64, which Apple's GPUs do not have."""
    weight = weight.detach()
    return (weight.cpu() if weight.device.type == "mps" else weight).double()
