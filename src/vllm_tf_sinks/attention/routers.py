# SPDX-License-Identifier: Apache-2.0
"""Keep vLLM from replacing the linear layers that a router reads directly."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch import nn

_kept: WeakSet[nn.Linear] = WeakSet()


def keep(layers: Iterable[nn.Linear]) -> None:
    """Mark `layers`, which vLLM must not replace: a module reads their weights, and vLLM's layers may pack weights."""
    _kept.update(layers)


def replace_only_linear(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `replace_linear_class`, to return a marked layer, or one whose class overrides `forward`, unchanged."""

    @wraps(original)
    def replace_linear_class(linear: nn.Linear, *args: Any, **kwargs: Any) -> Any:
        if linear in _kept or type(linear).forward is not nn.Linear.forward:
            return linear
        return original(linear, *args, **kwargs)

    return replace_linear_class
