# SPDX-License-Identifier: Apache-2.0
"""Sinks together with what an engine does to a prompt and to its KV cache: chunks, prefix hits, windows, dtypes."""

import numpy as np
import pytest
from support import jobs
from support.comparison import furthest, references
from support.feature_jobs import BUDGET, FP8, PROMPTS
from support.fork_server import JobError

EXACT = 5e-5  # float32, over prompts of 70 tokens
DROPPED = 1.0  # at the least, without the sinks

# Every expert is active: a router that rounds would choose another one for a row now and then
MODELS = {"gpt_oss": {"num_experts_per_tok": 4}, "granite_swa": {}}
# Prompts have 5 to 70 tokens, so that these windows are shorter than all, than most and than one
CASES = [("float32", 4), ("float32", 8), ("float32", 64), ("float16", 8), ("bfloat16", 8)]


@pytest.mark.parametrize(("dtype", "window"), CASES)
@pytest.mark.parametrize("name", MODELS)
def test_chunks_prefix_hits_and_windows(vllm, checkpoint, name, dtype, window):
    folder = checkpoint(vllm, name, sliding_window=window, **MODELS[name])
    cache = {} if dtype == "float32" else {"kv_cache_dtype": dtype}
    served = vllm.run("support.feature_jobs:served", checkpoint=folder, dtype=dtype, **cache)
    assert served["largest_step"] == BUDGET  # longer prompts were computed in chunks
    assert [hits for *_, hits in served["first"]] == [0, 0, 0, 0]  # prompt logprobs are not cached
    assert [hits for *_, hits in served["cached"]] == [64, 32, 0, 0]

    runs = [*served["first"], *served["cached"], *served["dropped"]]
    expected = references(vllm, folder, runs)
    kept, dropped = slice(0, 2 * len(PROMPTS)), slice(2 * len(PROMPTS), None)
    tolerance = EXACT
    if dtype != "float32":
        # Hugging Face's own distance from float32; vLLM rounds as often, elsewhere
        rounded = references(vllm, folder, runs[kept], dtype)
        tolerance = 3 * max(np.abs(a - b).max() for a, b in zip(rounded, expected[kept], strict=True))
    assert tolerance < DROPPED
    assert max(furthest(runs[kept], expected[kept])) < tolerance
    assert furthest(runs[dropped], expected[dropped])[1] > DROPPED


def test_reload_of_float16_renews_the_sinks(vllm, checkpoint):
    """The CPU kernel takes no float16 sinks, and upstream vLLM drops, rejects or casts them once, never again."""
    first, second = (checkpoint(vllm, "gpt_oss", seed=seed) for seed in (0, 1))
    cold = vllm.run("support.jobs:served_rows", checkpoint=second, dtype="float16")

    def reloaded(plugin):
        reload = {"checkpoint": first, "others": [second], "dtype": "float16"}
        return vllm.run("support.reload_jobs:reloaded_rows", env={"VLLM_TF_SINKS": plugin}, **reload)

    assert all(np.array_equal(a, b) for a, b in pairs(cold, reloaded("1")))
    if vllm.version == "0.30.0":
        with pytest.raises(JobError, match="expected scalar type BFloat16 but found Half"):
            reloaded("0")
    else:
        assert max(np.abs(a - b).max() for a, b in pairs(cold, reloaded("0"))) > DROPPED


def pairs(served, others):
    for (_, *rows), (_, *other_rows) in zip(served, others, strict=True):
        yield from zip(rows, other_rows, strict=True)


# In the words of vLLM up to 0.32, and since
FP8_NEEDS_AVX512 = r"FP8 KV cache on CPU requires|is not supported by the CPU attention backend on this host"


@pytest.mark.parametrize("kv_cache_dtype", FP8)
def test_fp8_cache(vllm, checkpoint, difference, kv_cache_dtype):
    """Compared with Hugging Face whose keys and values lose the same bits.

    float32's last digits, which differ by CPU, decide where a value on the brink of two of FP8's falls. One that falls
    elsewhere moves a prompt's rows by 0.3 at the most, and seldom happens in both prompts.
    """
    folder = checkpoint(vllm, "granite_swa")
    if not vllm.run("support.feature_jobs:has_fp8_kernels"):
        with pytest.raises(JobError, match=FP8_NEEDS_AVX512):
            difference(vllm, folder, kv_cache_dtype=kv_cache_dtype)
        return
    serve = {"checkpoint": folder, "kv_cache_dtype": kv_cache_dtype}
    differences = fp8_differences(vllm, **serve)
    assert min(differences) < EXACT
    assert max(differences) < DROPPED / 2
    assert max(fp8_differences(vllm, tamper="support.tampers:drop_sinks", **serve)) > DROPPED


def fp8_differences(vllm, checkpoint, kv_cache_dtype, tamper="") -> list[float]:
    """The largest difference of log-softmax rows, of each prompt."""
    served = vllm.run("support.jobs:served_rows", checkpoint=checkpoint, kv_cache_dtype=kv_cache_dtype, tamper=tamper)
    rows = [(prompt, *each, 0) for prompt, each in zip(jobs.PROMPTS, served, strict=True)]
    expected = vllm.run(
        "support.feature_jobs:fp8_reference_rows",
        checkpoint=checkpoint,
        sequences=[[*prompt, *new] for prompt, new, *_ in rows],
        kv_cache_dtype=kv_cache_dtype,
        module="transformers.models.granite_swa.modeling_granite_swa",
    )
    return [max(furthest([row], [expected_rows])) for row, expected_rows in zip(rows, expected, strict=True)]


@pytest.mark.parametrize(("name", "architecture"), [("gpt_oss", "GptOssForCausalLM"), ("llama", "LlamaForCausalLM")])
def test_cache_that_the_cpu_misreads_is_refused(vllm, checkpoint, difference, name, architecture):
    ours = f"{architecture} would get wrong logprobs with kv_cache_dtype=float16.* as torch.float32"
    with pytest.raises(JobError, match=REFUSED_BY_VLLM if refuses_mismatched_caches(vllm) else ours):
        difference(vllm, checkpoint(vllm, name), kv_cache_dtype="float16")


def test_cache_that_the_cpu_misreads_is_wrong_without_the_plugin(vllm, checkpoint, difference):
    serve = {"env": {"VLLM_TF_SINKS": "0"}, "kv_cache_dtype": "float16"}
    folder = checkpoint(vllm, "llama")
    if refuses_mismatched_caches(vllm):
        with pytest.raises(JobError, match=REFUSED_BY_VLLM):
            difference(vllm, folder, **serve)
    else:
        assert difference(vllm, folder, **serve) > DROPPED


REFUSED_BY_VLLM = 'kv_cache_dtype="float16" is incompatible with dtype="float32"'


def refuses_mismatched_caches(vllm) -> bool:
    return tuple(map(int, vllm.version.split("."))) >= (0, 33)
