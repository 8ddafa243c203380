# SPDX-License-Identifier: Apache-2.0
"""How a guard says no."""


class GuardError(ValueError):
    """A model that vLLM would serve with other logprobs than Transformers."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} Use a native implementation, if this vLLM has one: --model-impl vllm. VLLM_TF_SINKS=0 serves "
            "it as vLLM does: check its logprobs."
        )
