# SPDX-License-Identifier: Apache-2.0
"""Changes to vLLM that a test makes in its fork, before the engine starts."""


def drop_sinks() -> None:
    """Let the CPU kernel run without the sinks that its layer holds."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Impl

    forward = Impl.forward

    def without_sinks(self, *args, **kwargs):
        self.sinks = None
        return forward(self, *args, **kwargs)

    Impl.forward = without_sinks
