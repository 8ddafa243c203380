# SPDX-License-Identifier: Apache-2.0
"""What stands in a ForCausalLM for its base model and for its projection to the vocabulary."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn


class HeadError(ValueError):
    """An output head that cannot be run correctly."""


class Output:
    """What a base model returns: hidden states first, and None for whatever else is asked for."""

    def __init__(self, hidden_states: torch.Tensor | None) -> None:
        self.last_hidden_state = hidden_states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, key: Any) -> Any:
        return (self.last_hidden_state,)[key] if key in (0, -1) or isinstance(key, slice) else None

    def get(self, name: str, default: Any = None) -> Any:
        """Answers as a mapping would."""
        return self.last_hidden_state if name == "last_hidden_state" else default


class BaseStandIn(nn.Module):
    """Takes the place of a base model: whatever it is called with, it returns the hidden states it was given.

    While the ForCausalLM is built and while it runs, attributes of the true base model answer as there;
    its submodules answer as the stand-in itself, so that `self.model.decoder(...)` returns the hidden
    states too.
    """

    base: nn.Module | None = None
    built_with: dict[str, Any]
    hidden_states: torch.Tensor | None
    stands_in: bool

    def __init__(self, config: Any = None, *_: Any, **built_with: Any) -> None:
        super().__init__()
        self.config = config
        self.built_with = built_with
        self.hidden_states = None
        self.stands_in = True

    @classmethod
    def from_config(cls, config: Any, **built_with: Any) -> "BaseStandIn":
        """Stands for `AutoModel.from_config` and its like."""
        return cls(config, **built_with)

    _from_config = from_config

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Whoever walks vLLM's modules must not be told that this one has all that is asked for
            if name.startswith("__") or not self.__dict__.get("stands_in"):
                raise
        value = getattr(self.base, name, self)
        return self if isinstance(value, nn.Module) or callable(value) else value

    def forward(self, *_: Any, **__: Any) -> Output:
        """The hidden states [1, N, H], as a base model's output; none while the ForCausalLM is built."""
        return Output(self.hidden_states)


class Projection(nn.Module):
    """Takes the place of the projection: calls whatever `project` is, and answers for its weight.

    The weight has the shape, dtype and device of the true one, but is not a number: a head that
    computes with it itself does not go through vLLM's projection, and shows.
    """

    def __init__(self, name: str, like: nn.Linear) -> None:
        super().__init__()
        self.name = name
        self.in_features, self.out_features = like.in_features, like.out_features
        self.has_bias = like.bias is not None
        self.project: Callable[[torch.Tensor], torch.Tensor] = self._not_connected
        self.dtype, self.device = torch.get_default_dtype(), torch.device("cpu")

    def _not_connected(self, _: torch.Tensor) -> NoReturn:
        raise HeadError(f"{self.name} is not connected to vLLM's projection")

    @property
    def weight(self) -> torch.Tensor:
        """Not a number, [V, P]."""
        return self._nothing(self.out_features, self.in_features)

    @property
    def bias(self) -> torch.Tensor | None:
        """Not a number, [V], or None."""
        return self._nothing(self.out_features) if self.has_bias else None

    def _nothing(self, *shape: int) -> torch.Tensor:
        return torch.full((1,), torch.nan, dtype=self.dtype, device=self.device).expand(*shape)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Project [..., P] to logits [..., V]."""
        return self.project(input)
