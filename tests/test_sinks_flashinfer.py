# SPDX-License-Identifier: Apache-2.0
"""FlashInfer takes sinks in float32 only: vLLM's post-load step must reach the layers that we build."""

import pytest
from overlay import flashinfer
from support.flashinfer_jobs import ENV

# What FlashInfer says without cuDNN to sinks that it would take, and to others
NO_CUDNN = (
    "q_len_per_req > 1, window_left and sinks require the cuDNN graph backend (the cudnn-frontend python package); "
    "the fallback cubin decode path serves plain one-token decode only"
)
REFUSED = "sinks must be a float32 tensor of shape (num_heads_qo,) = (4,) on cpu"


def post_load(vllm, folder: str, **kwargs) -> list[dict]:
    path = str(flashinfer())
    return vllm.run("support.flashinfer_jobs:post_load", env=ENV, checkpoint=folder, path=path, **kwargs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sinks_end_in_float32_and_are_renewed_in_place(vllm, checkpoint, dtype):
    layers = post_load(vllm, checkpoint(vllm, "gpt_oss"), dtype=dtype)
    assert len(layers) == 3
    for layer in layers:
        assert layer == {
            "impl": "FlashInferImpl",
            "kernel": "torch.float32",
            "right": True,
            "live": True,
            "renewed": True,
            "same_address": True,
            "flashinfer": NO_CUDNN,
        }


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sink_of_another_shape(vllm, checkpoint, dtype):
    folder = checkpoint(vllm, "offset_llama", "remote", sink_form="holder")
    layers = post_load(vllm, folder, fragment="extra.offset", dtype=dtype, trust_remote_code=True)
    assert len(layers) == 3
    for layer in layers:
        assert (layer["impl"], layer["kernel"]) == ("FlashInferImpl", "torch.float32")
        assert layer["right"]
        assert layer["live"]
        assert layer["renewed"]
        assert layer["same_address"]
        assert layer["flashinfer"] == NO_CUDNN


def test_sinks_that_flashinfer_takes(vllm):
    """One number in float32 a head, as the layers above have them."""
    cases = {
        "right": ([4], "float32"),
        "bfloat16": ([4], "bfloat16"),
        "float16": ([4], "float16"),
        "too_few": ([3], "float32"),
        "column": ([4, 1], "float32"),
    }
    answers = vllm.run("support.flashinfer_jobs:answers", path=str(flashinfer()), heads=4, **cases)
    assert answers.pop("right") == NO_CUDNN
    assert all(answer.startswith(REFUSED) for answer in answers.values()), answers


def test_calls_of_vllm_fit_the_functions_of_flashinfer(vllm):
    """Whichever kernel vLLM chooses, its call has the sinks, and a signature that takes them."""
    calls = vllm.run("support.flashinfer_jobs:calls_with_sinks", env=ENV, path=str(flashinfer()))
    assert calls == dict.fromkeys(
        [
            "trtllm_batch_context_with_kv_cache",
            "trtllm_batch_decode_with_kv_cache",
            "flashinfer_xqa_batch_decode_with_kv_cache",
            "decode_wrapper.run",
            "prefill_wrapper.run",
        ],
        "",
    )
