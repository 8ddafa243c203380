# SPDX-License-Identifier: Apache-2.0
"""Changes to vLLM that a test makes in its fork, before the engine starts."""


def drop_sinks() -> None:
    """Let the CPU kernel run without the sinks that its layer holds."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    _run_without_sinks(CPUAttentionBackendImpl)


def drop_triton_sinks() -> None:
    """Let the Triton kernels run without the sinks that their layer holds."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    _run_without_sinks(TritonAttentionImpl)


def _run_without_sinks(impl: type) -> None:
    forward = impl.forward

    def without_sinks(self, *args, **kwargs):
        self.sinks = None
        return forward(self, *args, **kwargs)

    impl.forward = without_sinks


def refuse_sinks() -> None:
    """Let the CPU backend take no sinks, as a backend does that knows nothing of them."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Impl

    init = Impl.__init__

    def without_sinks(self, *args, **kwargs):
        if "sinks" in kwargs:
            raise TypeError("__init__() got an unexpected keyword argument 'sinks'")
        init(self, *args, **kwargs)

    Impl.__init__ = without_sinks


def ignore_sinks() -> None:
    """Let the CPU backend swallow sinks, as a backend does that takes any keyword."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Impl

    init = Impl.__init__

    def without_sinks(self, *args, **kwargs):
        init(self, *args, **{name: value for name, value in kwargs.items() if name != "sinks"})

    Impl.__init__ = without_sinks


def no_valid_backend() -> None:
    """Let vLLM find no attention backend for a layer with sinks, as on a card that has none."""
    import vllm.model_executor.layers.attention.attention as attention

    select = attention.get_attn_backend

    def without_sinks(*args, has_sink=False, **kwargs):
        if has_sink:
            raise ValueError("No valid attention backend found for this device")
        return select(*args, has_sink=has_sink, **kwargs)

    attention.get_attn_backend = without_sinks


def decode_context_parallel() -> None:
    """Let models be built for decode context parallel, which vLLM refuses on one device before that."""
    from vllm.model_executor.models.transformers.base import Base

    patch_config = Base._patch_config

    def with_decode_context_parallel(self):
        self.parallel_config.decode_context_parallel_size = 2
        patch_config(self)

    Base._patch_config = with_decode_context_parallel


def dry_run_nothing() -> None:
    """Let no model be run once without weights to its end, as one that looks at values."""
    from vllm_tf_sinks.attention import checks
    from vllm_tf_sinks.attention.dry_run import DryRun

    checks.perform_dry_run = lambda model, text_config: DryRun(error=RuntimeError("no values"))


def take_every_head_for_a_projection() -> None:
    """Let the plugin find no head to be more than a projection."""
    from vllm_tf_sinks.lm_head import install
    from vllm_tf_sinks.lm_head.classify import HeadSpec, Kind

    install.classify = lambda head, hidden_size: HeadSpec(Kind.PROJECTION)


def lose_a_target() -> None:
    """Let vLLM have no `pipeline_parallel`, as a version that we do not know."""
    from vllm.model_executor.models.transformers.base import Base

    del Base.pipeline_parallel
