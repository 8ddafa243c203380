# SPDX-License-Identifier: Apache-2.0
"""Leave linear layers that do more than `nn.Linear` as they are."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn


def replace_only_linear(original: Callable[..., Any]) -> Callable[..., Any]:
    """`replace_linear_class`, which keeps a layer whose class has a forward of its own: a router, say."""

    @wraps(original)
    def replace_linear_class(linear: nn.Linear, *args: Any, **kwargs: Any) -> Any:
        if type(linear).forward is not nn.Linear.forward:
            return linear
        return original(linear, *args, **kwargs)

    return replace_linear_class
