"""Attention whose weights are dropped by addressed masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    drop: Callable[[bool, Tensor, float], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **rest: Any,
) -> Tensor:
    """F.scaled_dot_product_attention, written out where it would draw a mask by itself.

    `drop` drops some of a tensor's numbers; it is told not to drop whole channels.
    """
    if dropout_p == 0 or rest.get("enable_gqa"):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **rest
        )
    scale = rest.get("scale")
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = bias.masked_fill(~attn_mask, -math.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    return drop(False, scores.softmax(-1), dropout_p) @ value
