# SPDX-License-Identifier: Apache-2.0
"""A model on a GPU: the meta device plays it, since neither can compute with a tensor that is on the CPU."""

import pytest
from support.checkpoints import CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_built_and_run_on_its_device(vllm, checkpoint, name):
    built = vllm.run("support.device_jobs:built_elsewhere", checkpoint=checkpoint(vllm, name))
    assert built["strays"] == []
    assert built["elsewhere"] == []
    assert built["logits"] == ("meta", (3, built["vocabulary"]))
