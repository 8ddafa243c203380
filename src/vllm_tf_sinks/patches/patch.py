# SPDX-License-Identifier: Apache-2.0
"""One change to vLLM: what it replaces, whether it fits, and the state it is in.

Named tuples, since every process of vLLM imports this: a frozen dataclass takes a millisecond to make.
"""

import importlib
import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple


class PatchError(RuntimeError):
    """A patch does not fit this vLLM."""


class State(str, Enum):
    """Where a patch stands in this process."""

    PENDING = "pending"
    APPLIED = "applied"
    NOT_NEEDED = "not needed"
    OFF = "off"
    DOES_NOT_FIT = "does not fit"


class Patch(NamedTuple):
    """A row of the catalogue.

    Attributes:
        name: `group.what`, as messages and docs call it.
        targets: where the patched callable may be, `module:Class.attribute` or `module:MAPPING[key]`;
            the first that exists is taken.
        parameters: the names that the target's signature must begin with; what follows has defaults.
        replacement: `module:function` of ours; it takes the original and returns what replaces it.
        why: what is wrong without the patch.
        has: says why this vLLM does not need the patch, or "" where it does; it looks at what is there.
        upstream: the change of vLLM that makes the patch unnecessary.
        until: when the row can be deleted.
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
        """The group that is applied whole or not at all: `check`, `guard`, `head` or `sinks`."""
        return self.name.partition(".")[0]

    def find(self) -> "Target":
        """The target in this vLLM.

        Raises:
            PatchError: if none of `targets` exists, or its signature is not the one expected.
        """
        for path in self.targets:
            if (target := Target.find(path)) is not None:
                target.check_parameters(self.parameters)
                return target
        raise PatchError(f"this vLLM has no {' or '.join(self.targets)}")

    def make(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What replaces `original`."""
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
        """The target at `path`, or None where this vLLM has no such place."""
        module, _, rest = path.partition(":")
        is_entry = rest.endswith("]")
        dotted, _, key = rest[:-1].partition("[") if is_entry else rest.rpartition(".")
        try:
            owner: Any = importlib.import_module(module)
            for name in filter(None, dotted.split(".")):
                owner = getattr(owner, name)
        except (ImportError, AttributeError):
            return None
        there = key in owner if is_entry else key in vars(owner)
        return cls(path, owner, key, is_entry) if there else None

    def get(self) -> Callable[..., Any]:
        """The callable that is there now."""
        current: Callable[..., Any] = self.owner[self.key] if self.is_entry else vars(self.owner)[self.key]
        return current

    def set(self, value: Callable[..., Any]) -> None:
        """Put `value` there."""
        if self.is_entry:
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)

    def check_parameters(self, expected: tuple[str, ...]) -> None:
        """Check that a caller who passes `expected` is served.

        Raises:
            PatchError: if the signature does not begin with `expected`, or demands more.
        """
        parameters = list(inspect.signature(self.get()).parameters.values())
        names = tuple(p.name for p in parameters[: len(expected)])
        more = [
            p.name
            for p in parameters[len(expected) :]
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        # A wrapper of another plugin that passes everything on may hide the names
        passes_on = {p.VAR_POSITIONAL for p in parameters if p.kind is p.VAR_POSITIONAL}
        if (names != expected and not passes_on) or more:
            signature = inspect.signature(self.get())
            raise PatchError(f"{self.path} has the signature {signature}, expected ({', '.join(expected)}, ...)")
