"""Matrix products of the extension. Its matrices are column-major: ``D = op(B) op(A)`` in torch's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def torch_dtype(dtype: Any) -> torch.dtype | None:
    """torch's name of the extension's ``DType``."""
    names = {"kFloat32": torch.float32, "kBFloat16": torch.bfloat16, "kFloat16": torch.float16}
    return None if dtype is None else names[dtype.name]


def _product(a: Tensor, transpose_a: bool, b: Tensor, transpose_b: bool) -> Tensor:
    """fp32 ``op(b) op(a)`` of matrices, leading dimensions joined; cuBLAS takes one dtype and one device."""
    if a.dtype != b.dtype or a.device != b.device or not a.is_cuda:
        raise TypeError(f"gemm: found {a.dtype} on {a.device} and {b.dtype} on {b.device}, expected one GPU and dtype")
    left, right = (matrix.reshape(-1, matrix.shape[-1]).float() for matrix in (b, a))
    return (left.t() if transpose_b else left) @ (right.t() if transpose_a else right)


def _store(target: Tensor, value: Tensor, accumulate: bool) -> None:
    target.copy_(value.view(target.shape) + (target.float() if accumulate else 0.0))


def generic_gemm(
    a: Tensor,
    transpose_a: bool,
    b: Tensor,
    transpose_b: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Tensor | None]:
    """[product, gradient of the bias, None, None]; a bias is added, or with ``grad`` its gradient summed over ``b``."""
    del bias_dtype, gelu_in, workspace, workspace_size, use_split_accumulator, comm_type
    used = (quantizer, comm_overlap, extra_output)
    if any(x is not None for x in used) or gelu or bulk_overlap or alpha != 1.0 or beta not in (None, 0.0, 1.0):
        raise NotImplementedError("gemm: only plain products have a reference")
    product = _product(a, transpose_a, b, transpose_b)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = b.reshape(-1, b.shape[-1]).float().sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias.float()
    if out is None:
        rows = b.shape[:-1] if not transpose_b else product.shape[:1]
        out = product.to(torch_dtype(out_dtype) or a.dtype).view(*rows, product.shape[-1])
    else:
        _store(out, product, accumulate)
    return [out, bias_grad, None, None]


def te_general_grouped_gemm(
    a: Sequence[Tensor],
    transpose_a: bool,
    b: Sequence[Tensor],
    transpose_b: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_dtype: Any,
    single_output: bool,
    pre_gelu_out: Sequence[Tensor],
    grad: bool,
    workspaces: Sequence[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> Sequence[Tensor]:
    """One product per expert into ``out``: one tensor for each, or one for all with ``single_output``.

    A bias is added, or with ``grad`` its gradient summed over ``b``, into ``bias``.
    """
    del out_dtype, bias_dtype, workspaces, workspace_size, use_split_accumulator, sm_count
    if any(x.numel() for x in pre_gelu_out):
        raise NotImplementedError("grouped gemm: only products without GELU have a reference")
    products = [_product(x, transpose_a, y, transpose_b) for x, y in zip(a, b, strict=True)]
    for index, each in enumerate(bias):
        if each.numel() and grad:
            each.copy_(b[index].float().sum(0))
        elif each.numel():
            products[index] = products[index] + each.float()
    if single_output:
        assert [len(product) for product in products] == list(m_splits), "rows of the experts and m_splits differ"
        _store(out[0], torch.cat(products), accumulate)
    else:
        for target, product in zip(out, products, strict=True):
            _store(target, product, accumulate)
    return bias


REFERENCES = {"generic_gemm": generic_gemm, "te_general_grouped_gemm": te_general_grouped_gemm}
