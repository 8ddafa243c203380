# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton attention (TRITON_ATTN) in an engine on the CPU, its kernels run by Triton's interpreter."""

from support.jobs import call
from support.tampers import drop_triton_sinks


def why_no_triton() -> str:
    """Why this vLLM cannot run Triton's kernels here, or ""."""
    from vllm.triton_utils import HAS_TRITON

    return "" if HAS_TRITON else "this vLLM is tested without Triton's interpreter"


def with_triton_attention(runs: str, has_sinks: bool = True, **arguments):
    """What the job `runs`, `module:function`, gives where Triton's attention serves every ordinary layer.

    Args:
        runs: the job, which starts an engine.
        has_sinks: False to let the kernels run without sinks.
        arguments: of the job.
    """
    _use_triton_attention()
    if not has_sinks:
        drop_triton_sinks()
    return call(runs, **arguments)


def _use_triton_attention() -> None:
    """Play a GPU twice: for the choice of the backend, and for the size of the tiles that fill the KV cache."""
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    path = AttentionBackendEnum.TRITON_ATTN.get_path()
    CpuPlatform.get_attn_backend_cls = classmethod(lambda cls, *args, **kwargs: path)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
