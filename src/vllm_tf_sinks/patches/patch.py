# SPDX-License-Identifier: Apache-2.0
"""One patch of vLLM: its target, the check whether it fits, and its state.

The classes are named tuples, since every process of vLLM imports them: a frozen dataclass takes 1 ms to define.
"""

import importlib
import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import wrapt

from vllm_tf_sinks.errors import PatchError


class State(str, Enum):
    """The state of a patch in this process."""

    PENDING = "pending"
    APPLIED = "applied"
    NOT_NEEDED = "not needed"
    OFF = "off"
    DOES_NOT_FIT = "does not fit"


class Patch(NamedTuple):
    """A row of the table of patches.

    Attributes:
        name: the name in messages and docs, `group.name`.
        targets: paths of the callable to patch, `module:Class.attribute` or `module:MAPPING[key]`. The first that
            exists is patched.
        parameters: the first parameters of the target's signature. All others must have defaults.
        replacement: `module:function` of this package, which takes the original and returns its replacement.
        why: what is wrong without the patch.
        has: a function that returns a reason if this vLLM does not need the patch, or "" if it does.
        upstream: the change of upstream vLLM that makes the patch unnecessary.
        until: the condition under which the row can be deleted.
    """

    name: str
    targets: tuple[str, ...]
    parameters: tuple[str, ...]
    replacement: str
    why: str
    has: Callable[[], str]
    upstream: str
    until: str

    @property
    def group(self) -> str:
        """The group: `check`, `guard`, `head` or `sinks`. All patches of a group are applied, or none."""
        return self.name.partition(".")[0]

    def find(self) -> "Target":
        """Find the target in this vLLM.

        Raises:
            PatchError: naming the targets, if none exists, or if the signature does not begin with `parameters`.
        """
        for path in self.targets:
            if (target := Target.find(path)) is not None:
                target.check_parameters(self.parameters)
                return target
        raise PatchError(f"this vLLM has no {' or '.join(self.targets)}")

    def make(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Make the replacement of `original`."""
        module, _, name = self.replacement.partition(":")
        replacement: Callable[..., Any] = getattr(importlib.import_module(module), name)(original)
        return replacement


class Row(NamedTuple):
    """A patch and its state in this process, as `status()` reports it."""

    patch: Patch
    state: State
    reason: str = ""

    def __str__(self) -> str:
        """The row in one line."""
        return f"{self.patch.name}: {self.state.value}" + (f" ({self.reason})" if self.reason else "")


class Target(NamedTuple):
    """A place that holds a callable: an attribute of a class or module, or an entry of a mapping."""

    path: str
    owner: Any
    key: str
    is_entry: bool

    @classmethod
    def find(cls, path: str) -> "Target | None":
        """Find the target at `path`; None if this vLLM does not have it."""
        module, _, rest = path.partition(":")
        dotted, _, entry = rest.removesuffix("]").partition("[")
        try:
            owner, key, found = wrapt.resolve_path(module, dotted)
        except (ImportError, AttributeError):
            return None
        if entry:
            mapping: Any = found
            return cls(path, mapping, entry, True) if entry in mapping else None
        return cls(path, owner, key, False) if key in vars(owner) else None

    def get(self) -> Callable[..., Any]:
        """The callable that the target holds now."""
        current: Callable[..., Any] = self.owner[self.key] if self.is_entry else vars(self.owner)[self.key]
        return current

    def set(self, value: Callable[..., Any]) -> None:
        """Let the target hold `value`."""
        if self.is_entry:
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)

    def check_parameters(self, expected: tuple[str, ...]) -> None:
        """Check that the target can be called with the parameters `expected`.

        Raises:
            PatchError: naming the target, if its signature does not begin with `expected`, or has more parameters
                without a default.
        """
        parameters = list(inspect.signature(self.get()).parameters.values())
        names = tuple(p.name for p in parameters[: len(expected)])
        required = [
            p.name
            for p in parameters[len(expected) :]
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        # The wrapper of another plugin may have *args in place of the names
        is_variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        if (names != expected and not is_variadic) or required:
            signature = inspect.signature(self.get())
            raise PatchError(f"{self.path} has the signature {signature}, expected ({', '.join(expected)}, ...)")
