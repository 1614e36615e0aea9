"""Every transform changes nothing but what is rounded."""

from __future__ import annotations

import pytest
import torch

from fluxq.kernels.ops import hadamard_transform
from fluxq.kernels.transforms import InputTransform, hadamard_matrix, rotate
from fluxq.quantize import lowrank

K, N = 256, 64


def tokens(m: int = 300) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(m, K, generator=g) * torch.rand(K, generator=g) * 5 + torch.randn(K, generator=g)


def basis(count: int = 8) -> torch.Tensor:
    q = torch.linalg.qr(torch.randn(K, count, generator=torch.Generator().manual_seed(2)))[0].T.contiguous()
    return q.bfloat16().float()  # not quite orthonormal


G = torch.Generator().manual_seed(5)
MEAN = torch.randn(K, generator=G)
SMOOTH = torch.rand(K, generator=G) + 0.1
TRANSFORMS = {
    "center": InputTransform(mean=MEAN),
    "smooth": InputTransform(smooth=SMOOTH),
    "deflate": InputTransform(basis=basis()),
    "hadamard 16": InputTransform(hadamard=16),
    "hadamard 128": InputTransform(hadamard=128),
    "regular hadamard 256": InputTransform(hadamard=256, regular=True),
    "all": InputTransform(MEAN, SMOOTH, basis(), 64),
    "all, regular": InputTransform(MEAN, SMOOTH, basis(), 64, regular=True),
}


@pytest.mark.parametrize("rank", [0, 6])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_output_is_the_same_before_rounding(name, rank):
    transform, x = TRANSFORMS[name], tokens()
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    y = x.double() @ w.double().T
    a, b = lowrank.branch(w, rank) if rank else (torch.zeros(0, K), torch.zeros(N, 0))
    rest = w - b @ a
    v, out = transform.of_weight(rest)
    got = transform.of_tokens(x) @ v.T + x @ a.T @ b.T
    t = transform.deflated(x)
    if t is not None and out is not None:
        got += t @ out.T
    extra = transform.extra_bias(rest)
    if extra is not None:
        got += extra
    assert (got - y).norm() / y.norm() < 1e-5
    if transform.smooth is not None or transform.hadamard:
        assert not torch.allclose(v, w, atol=1e-3)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_gram_is_that_of_the_transformed_tokens(name):
    transform, x = TRANSFORMS[name], tokens(500)
    z = transform.of_tokens(x).double()
    gram = x.T @ x / len(x)
    before = gram.clone()
    got = transform.of_gram(gram, x.mean(0))
    assert torch.equal(gram, before)
    assert (got - (z.T @ z / len(z))).norm() < 1e-4 * (z.T @ z / len(z)).norm()


def test_columns_transform_as_they_do_together():
    x = tokens()
    transform = InputTransform(MEAN, SMOOTH, None, 64)
    parts = [transform.of_columns(slice(*cut)).of_tokens(x[:, slice(*cut)]) for cut in ((0, 64), (64, 256))]
    assert torch.equal(torch.cat(parts, 1), transform.of_tokens(x))


@pytest.mark.parametrize(
    ("size", "regular"), [(16, False), (32, False), (64, False), (128, False), (16, True), (64, True), (256, True)]
)
def test_hadamard_is_orthonormal_symmetric_and_spreads(size, regular):
    h = hadamard_matrix(size, regular)
    assert torch.allclose(h @ h, torch.eye(size), atol=1e-6) and torch.equal(h, h.T)
    one = torch.zeros(1, K)
    one[0, 3] = 1
    spread = rotate(one, size, regular)
    assert (spread != 0).sum() == size and float(spread.abs().amax()) == pytest.approx(size**-0.5)


@pytest.mark.parametrize("size", [16, 64, 256])
def test_each_row_of_the_regular_matrix_has_one_sum_so_that_a_constant_stays_one(size):
    """Sylvester's gathers it in one channel of its block."""
    h, constant = hadamard_matrix(size, True), torch.ones(2, K)
    assert torch.equal(h.sum(1), torch.ones(size))
    assert torch.equal(rotate(constant, size, True), constant)
    assert torch.equal(hadamard_transform(constant, size, True), constant)
    assert float(rotate(constant, 16).amax()) == 4


@pytest.mark.parametrize(("size", "regular"), [(16, False), (128, False), (16, True), (64, True), (256, True)])
def test_butterflies_are_the_product_with_the_matrix(size, regular):
    x = tokens()
    assert torch.allclose(hadamard_transform(x, size, regular), rotate(x, size, regular), atol=1e-4)


def test_branch_is_the_truncated_svd():
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(1)) @ torch.diag(torch.arange(1.0, K + 1) ** -1.0)
    a, b = lowrank.branch(w, 8)
    singular = torch.linalg.svdvals(w)
    assert float((w - b @ a).norm()) == pytest.approx(float(singular[8:].norm()), rel=1e-2)
    assert torch.allclose(b.T @ b, torch.eye(8), atol=1e-5)


def test_whitened_branch_leaves_less_of_the_output():
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    x = tokens(2000)
    gram = x.T @ x / len(x)
    lost = {}
    for name, metric in (("plain", None), ("whitened", gram)):
        a, b = lowrank.branch(w, 8, metric)
        lost[name] = float((x @ (w - b @ a).T).norm())
    best = torch.linalg.svdvals(x @ w.T)[8:].norm()
    assert lost["whitened"] < lost["plain"]
    assert lost["whitened"] == pytest.approx(float(best), rel=1e-2)


def test_principal_directions_hold_most_of_the_tokens():
    x = tokens(2000)
    gram = x.T @ x / len(x)
    p = lowrank.principal_directions(gram, 4)
    values = torch.linalg.eigvalsh(gram)
    assert float((p @ gram @ p.T).trace()) == pytest.approx(float(values[-4:].sum()), rel=1e-2)
    assert torch.allclose(p @ p.T, torch.eye(4), atol=1e-5)


def test_balancing_keeps_the_product():
    a, b = torch.randn(4, K, generator=G) * 1e3, torch.randn(N, 4, generator=G) * 1e-3
    a2, b2 = lowrank.balanced(a, b)
    assert torch.allclose(b2 @ a2, b @ a, rtol=1e-4, atol=1e-4)
    assert torch.allclose(a2.norm(dim=1), b2.norm(dim=0), rtol=1e-4)
