# SPDX-License-Identifier: Apache-2.0
"""FlashInfer takes sinks in float32 only: vLLM's post-load step must reach the layers that we build."""

import pytest
from overlay import flashinfer
from support.flashinfer_jobs import ENV


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
