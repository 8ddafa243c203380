# SPDX-License-Identifier: Apache-2.0
"""torch.compile takes what is patched, and graphs made with the plugin on and off are kept apart."""

import pytest

COMPILED = {"TORCHDYNAMO_DISABLE": "0"}
ON, OFF = "1", "0"
COMPILING = "support.compile_jobs:compiling"


def test_shifted_positions_are_compiled(vllm, checkpoint, difference, tmp_path):
    folder = checkpoint(vllm, "roberta", tie_word_embeddings=False)
    environment = {**COMPILED, "VLLM_CACHE_ROOT": str(tmp_path)}
    assert difference(vllm, folder, env=environment, **vllm.run(COMPILING)) < 1e-4


@pytest.mark.parametrize("order", [(ON, OFF), (OFF, ON)], ids=["off second", "on second"])
def test_sinks_and_head_with_one_cache_for_both_ways(vllm, checkpoint, difference, order, tmp_path):
    folder = checkpoint(vllm, "granite_swa_scaled", tie_word_embeddings=False)
    environment = {**COMPILED, "VLLM_CACHE_ROOT": str(tmp_path)}
    engine = vllm.run(COMPILING)
    keeps_graphs = vllm.run("support.compile_jobs:keeps_graphs")
    graphs = tmp_path / "torch_compile_cache" / "torch_aot_compile"
    for number, value in enumerate(order, 1):
        found = difference(vllm, folder, env={**environment, "VLLM_TF_SINKS": value}, **engine)
        assert found < 1e-4 if value == ON else found > 1e-2
        # Attention is opaque to a graph, so the logprobs alone do not tell which one ran
        assert len(list(graphs.iterdir()) if graphs.exists() else []) == (number if keeps_graphs else 0)
