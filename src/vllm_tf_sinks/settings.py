# SPDX-License-Identifier: Apache-2.0
"""The environment variable `VLLM_TF_SINKS`, and the settings of this process."""

import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import NamedTuple

VARIABLE = "VLLM_TF_SINKS"

# Value -> its effect, for messages
VALUES = {
    "1": "apply every patch this vLLM needs (default)",
    "0": "change nothing",
    "sinks": "attention sinks only",
    "head": "output heads only",
    "strict": "like 1, but refuse to start if a patch does not fit or this vLLM was not tested",
}


class Settings(NamedTuple):
    """The settings of the user.

    Attributes:
        value: one of `VALUES`.
    """

    value: str = "1"

    @property
    def groups(self) -> frozenset[str]:
        """The groups of patches to apply: `sinks`, `head` or both, with `guard` and `check`; none for `0`."""
        if self.value == "0":
            return frozenset()
        return (frozenset({self.value} & {"sinks", "head"}) or frozenset({"sinks", "head"})) | {"guard", "check"}

    @property
    def strict(self) -> bool:
        """Whether a patch that does not fit is an error."""
        return self.value == "strict"

    @property
    def fingerprint(self) -> str:
        """The part of vLLM's compile cache key that tells graphs of these settings from others."""
        return f"{self.value} {version('vllm-tf-sinks')}"


NOT_REGISTERED = Settings("0")  # register() was not called
_chosen = NOT_REGISTERED


def choose(settings: Settings) -> None:
    """Set the settings of this process."""
    global _chosen
    _chosen = settings


def chosen() -> Settings:
    """The settings of this process."""
    return _chosen


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Parse `VLLM_TF_SINKS`. Unset or empty means `1`.

    Raises:
        ValueError: naming the variable and listing `VALUES`, if its value is none of them.
    """
    value = environment.get(VARIABLE, "").strip().lower() or "1"
    if value not in VALUES:
        choices = "; ".join(f"{name}: {effect}" for name, effect in VALUES.items())
        raise ValueError(f"{VARIABLE}={environment[VARIABLE]!r} is not a valid value. Use one of {choices}.")
    return Settings(value)
