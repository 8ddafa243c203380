# SPDX-License-Identifier: Apache-2.0
"""Stubs in a ForCausalLM: for its base model, and for its projection to the vocabulary."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from vllm_tf_sinks.errors import HeadError


class Output:
    """The output of a base model: hidden states [1, N, H], or None for each other field.

    A ForCausalLM may read it by attribute, by index, by slice or by key.
    """

    def __init__(self, hidden_states: torch.Tensor | None) -> None:
        self.last_hidden_state = hidden_states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, key: Any) -> Any:
        return (self.last_hidden_state,)[key] if key in (0, -1) or isinstance(key, slice) else None

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field `name`, as a mapping does."""
        return self.last_hidden_state if name == "last_hidden_state" else default


class BaseStub(nn.Module):
    """A stub for a base model: each call returns `hidden_states`, for all arguments.

    While it is active, attributes of the real base model have their values there. Its submodules and methods are
    the stub itself, so that `self.model.decoder(...)` returns the hidden states too.

    Attributes:
        base: the real base model, or None.
        built_with: the keyword arguments with which the ForCausalLM built the base model.
        hidden_states: [1, N, H]; None while the ForCausalLM is built.
        is_active: whether the ForCausalLM is being built or run.
    """

    base: nn.Module | None = None
    built_with: dict[str, Any]
    hidden_states: torch.Tensor | None
    is_active: bool

    def __init__(self, config: Any = None, *_: Any, **built_with: Any) -> None:
        super().__init__()
        self.config = config
        self.built_with = built_with
        self.hidden_states = None
        self.is_active = True

    @classmethod
    def from_config(cls, config: Any, **built_with: Any) -> "BaseStub":
        """Build the stub, in place of `AutoModel.from_config`."""
        return cls(config, **built_with)

    _from_config = from_config

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Code of vLLM that walks all modules must not find every attribute here
            if name.startswith("__") or not self.__dict__.get("is_active"):
                raise
        value = getattr(self.base, name, self)
        return self if isinstance(value, nn.Module) or callable(value) else value

    def forward(self, *_: Any, **__: Any) -> Output:
        """Return the hidden states [1, N, H] as a base model's output."""
        return Output(self.hidden_states)


class Projection(nn.Module):
    """A stub for the projection to the vocabulary: calls `project`, a function that can be replaced.

    Its weight has the shape, dtype and device of the real weight, but is NaN. So the logits of a head that reads the
    weight, and bypasses vLLM's projection, are NaN.

    Attributes:
        name: the name of the projection in the ForCausalLM.
        in_features, out_features: P and V.
        has_bias: whether the projection has a bias.
        project: a function of hidden states [..., P] to logits [..., V].
        dtype, device: of the weight and the bias.
    """

    def __init__(self, name: str, like: nn.Linear) -> None:
        super().__init__()
        self.name = name
        self.in_features, self.out_features = like.in_features, like.out_features
        self.has_bias = like.bias is not None
        self.project: Callable[[torch.Tensor], torch.Tensor] = self._not_connected
        self.dtype, self.device = torch.get_default_dtype(), torch.device("cpu")

    def _not_connected(self, _: torch.Tensor) -> NoReturn:
        raise HeadError(f"The head ran before its projection {self.name} was connected to vLLM's. Report this error.")

    @property
    def weight(self) -> torch.Tensor:
        """NaN, [V, P]."""
        return self._nan(self.out_features, self.in_features)

    @property
    def bias(self) -> torch.Tensor | None:
        """NaN, [V]; None for a projection without bias."""
        return self._nan(self.out_features) if self.has_bias else None

    def _nan(self, *shape: int) -> torch.Tensor:
        return torch.full((1,), torch.nan, dtype=self.dtype, device=self.device).expand(*shape)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Project [..., P] to logits [..., V]."""
        return self.project(input)
