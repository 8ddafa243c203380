# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention function for models that read its output by head."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

BY_HEAD = "vllm_by_head"


def attention_by_head(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Call vLLM's attention function, and view its output [N, heads * size] as [1, N, heads, size].

    Transformers' own attention functions return the output by head. Queries are [1, heads, N, size].
    """
    output, _ = ALL_ATTENTION_FUNCTIONS["vllm"](module, query, key, value, *args, **kwargs)
    return output.view(1, query.shape[-2], query.shape[1], -1), None


ALL_ATTENTION_FUNCTIONS.register(BY_HEAD, attention_by_head)
