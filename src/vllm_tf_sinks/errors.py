# SPDX-License-Identifier: Apache-2.0
"""The errors of this package. Each message says what is wrong and what to do."""

from vllm_tf_sinks import compat
from vllm_tf_sinks.settings import VARIABLE


class PatchError(RuntimeError):
    """A patch does not fit this vLLM."""


class BrokenInstallError(RuntimeError):
    """A package that this one needs is missing, or this one cannot check models on this vLLM."""


class HookError(ValueError):
    """Two hook plugins return different values for one model."""


class SinkError(ValueError):
    """vLLM cannot apply an attention sink of the model."""


class HeadError(ValueError):
    """vLLM cannot run the output head of the model, or load its tensors or adapters."""


class UnsupportedModelError(ValueError):
    """vLLM would compute other logprobs than Transformers, for a reason other than its sinks or its head."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} Use a native implementation, if this vLLM has one: --model-impl vllm. {VARIABLE}=0 serves "
            "the model as upstream vLLM does: check its logprobs."
        )


class LoadError(ValueError):
    """The check after loading failed: the model differs from its checkpoint or its class, or cannot be checked."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} This package was not tested on vLLM {compat.engine.version()}, which may use the patched "
            f"functions in another way. Use vLLM {compat.engine.TESTED[-1]}, or a native implementation: --model-impl "
            f"vllm. {VARIABLE}=0 serves the model as upstream vLLM does: check its logprobs."
        )
