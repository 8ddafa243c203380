# SPDX-License-Identifier: Apache-2.0
"""The environment variable `VLLM_TF_SINKS`, parsed in one place."""

import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import NamedTuple

VARIABLE = "VLLM_TF_SINKS"

# value -> what it does, in the words of the error message
VALUES = {
    "1": "apply every patch this vLLM needs (default)",
    "0": "change nothing",
    "sinks": "attention sinks only",
    "head": "output heads only",
    "strict": "like 1, and refuse to start where a patch does not fit, or on a vLLM that was not tested",
}


class Settings(NamedTuple):
    """What the user asked for.

    Attributes:
        value: one of `VALUES`.
    """

    value: str = "1"

    @property
    def groups(self) -> frozenset[str]:
        """The groups of patches to apply: of `sinks` and `head`, and with any of them `guard` and `check`."""
        if self.value == "0":
            return frozenset()
        return (frozenset({self.value} & {"sinks", "head"}) or frozenset({"sinks", "head"})) | {"guard", "check"}

    @property
    def strict(self) -> bool:
        """Whether a patch that does not fit is an error."""
        return self.value == "strict"

    @property
    def fingerprint(self) -> str:
        """What distinguishes graphs compiled under these settings: part of vLLM's compile cache key."""
        return f"{self.value} {version('vllm-tf-sinks')}"


NOT_REGISTERED = Settings("0")  # register() was not called
_chosen = NOT_REGISTERED


def choose(settings: Settings) -> None:
    """Take `settings` for all that the patches do in this process from now on."""
    global _chosen
    _chosen = settings


def chosen() -> Settings:
    """The settings of this process: what was chosen last."""
    return _chosen


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Parse `VLLM_TF_SINKS`; unset or empty means `1`.

    Raises:
        ValueError: for any other value than the five of `VALUES`; the message lists them.
    """
    value = environment.get(VARIABLE, "").strip().lower() or "1"
    if value not in VALUES:
        choices = "; ".join(f"{name}: {effect}" for name, effect in VALUES.items())
        raise ValueError(f"{VARIABLE}={environment[VARIABLE]!r} is not a value it takes. Use one of {choices}.")
    return Settings(value)
