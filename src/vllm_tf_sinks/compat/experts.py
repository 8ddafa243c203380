# SPDX-License-Identifier: Apache-2.0
"""vLLM's mixture-of-experts layers in the Transformers backend."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


def reads_transposed_weights() -> bool:
    """Whether this vLLM reads `is_transposed` of a model's experts (from 0.33)."""
    from vllm.model_executor.models.transformers import moe

    return "is_transposed" in inspect.getsource(inspect.unwrap(moe.MoEMixin.recursive_replace))


@contextmanager
def routed_by_vllm_where(condition: Callable[[Any, Any], bool]) -> Iterator[None]:
    """Within the context, vLLM routes a block of experts itself only if `condition(block, fuser)` is true."""
    from vllm.model_executor.models.transformers import moe

    fuser_class = moe.MoEBlockFuser

    class ConditionalFuser:
        @staticmethod
        def match(block: Any, *args: Any, **kwargs: Any) -> Any:
            fuser = fuser_class.match(block, *args, **kwargs)
            return fuser if fuser is not None and condition(block, fuser) else None

    with patch.object(moe, "MoEBlockFuser", ConditionalFuser):
        yield
