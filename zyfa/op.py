"""torch.ops.zyfa.attention: the public call as a registered operator, kept whole by torch.compile and torch.export."""

import torch
from torch import Tensor

from .checks import FP8
from .config import AttentionConfig


@torch.library.custom_op("zyfa::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    precision: str = "auto",
    config: str | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of zyfa.attention with the same arguments; lse is empty unless return_lse; config is its JSON."""
    from .interface import attention

    result = attention(
        q, k, v, causal=causal, softmax_scale=softmax_scale, window_size=(window_left, window_right), softcap=softcap,
        sink=sink, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, precision=precision,
        config=AttentionConfig.from_json(config) if config is not None else None, return_lse=return_lse,
    )  # fmt: skip
    return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))


@attention_op.register_fake
def _shapes(
    q, k, v, causal=False, softmax_scale=None, window_left=-1, window_right=-1, softcap=0.0, sink=None,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, q_descale=None, k_descale=None,
    v_descale=None, precision="auto", config=None, return_lse=False,
):  # fmt: skip
    """Shapes and dtypes of the result, for tracing."""
    dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    if not return_lse:
        return out, q.new_empty(0, dtype=torch.float32)
    heads = q.shape[-2]
    shape = (q.shape[0], heads, q.shape[1]) if cu_seqlens_q is None else (heads, q.shape[0])
    return out, q.new_empty(shape, dtype=torch.float32)


def through_operator(q, k, v, *, window_size, config, out, descales, return_lse: bool, **same):
    """What zyfa.attention does while torch.compile or torch.export traces it: one call of the operator."""
    q_descale, k_descale, v_descale = (_as_tensor(d, q) for d in descales)
    result, lse = torch.ops.zyfa.attention(
        q, k, v, window_left=window_size[0], window_right=window_size[1], q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, config=config.to_json() if config is not None else None, return_lse=return_lse, **same,
    )  # fmt: skip
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def _as_tensor(descale, q):
    return torch.full((1,), descale, device=q.device) if isinstance(descale, (int, float)) else descale
