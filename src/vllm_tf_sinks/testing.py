# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: assert that vLLM's Transformers backend gives a model Hugging Face's logprobs.

    def test_my_model(logprob_parity):
        logprob_parity("my-organisation/my-model")

It is there wherever this package is installed, and imports nothing until a test asks for `logprob_parity`.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vllm_tf_sinks.parity import Comparison
    from vllm_tf_sinks.zygote import Zygote

# For engines that are started for a few tokens; set outside, they keep their values
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # spares each engine 10 to 20 s of compiling one small function
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
IMPORTS = ("transformers", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.model_executor.models.registry")
LARGEST_WHOLE = 2**15  # a vocabulary of which whole rows are compared
SMALL_CACHE = 2**26  # bytes for keys and values of a tiny model; clearing more takes seconds


def warm() -> None:
    """What a zygote does before its first fork, after IMPORTS."""
    from vllm_tf_sinks import vllm_api

    vllm_api.engine.import_worker()
    vllm_api.engine.inspect_models_in_this_process()


@pytest.fixture(scope="session")
def vllm_zygote() -> "Iterator[Zygote]":
    """A process that has imported vLLM, and forks for each job; started when a test first asks for it."""
    from vllm_tf_sinks.zygote import Zygote

    with Zygote({**SETTINGS, **os.environ}, IMPORTS, f"{__name__}:warm") as zygote:
        yield zygote


@pytest.fixture
def logprob_parity(vllm_zygote: "Zygote", tmp_path_factory: pytest.TempPathFactory) -> "Callable[..., Comparison]":
    """Serve a model with vLLM's Transformers backend, and fail unless its logprobs are Hugging Face's."""

    def assert_parity(
        model: Any,
        *,
        prompts: list[str] | list[list[int]] | None = None,
        new_tokens: int = 8,
        dtype: str = "float32",
        tolerance: float | None = None,
        trust_remote_code: bool = False,
        env: Mapping[str, str] | None = None,
        **engine: Any,
    ) -> "Comparison":
        """Compare a model served by vLLM with Hugging Face's eager code, prompt and decode.

        Args:
            model: a folder, a hub id, or a config of Transformers, for which random weights are made.
            prompts: texts or tokens; built-in texts, or random tokens where there is no tokenizer, if None.
            dtype: of both; `auto` is the checkpoint's own.
            tolerance: of the mean difference, by default that of `vllm-tf-sinks verify` for the dtype.
            env: environment variables to serve it with.
            engine: arguments of `vllm.LLM`.

        Raises:
            AssertionError: if they differ or the model is refused, with the figures, the places that are
                furthest apart, and what vLLM does with the plugin off.
        """
        __tracebackhide__ = True
        from vllm_tf_sinks import parity
        from vllm_tf_sinks.cli.verify import as_text

        if not isinstance(model, (str, Path)):
            folder = str(tmp_path_factory.mktemp("checkpoint"))
            vllm_zygote.run("vllm_tf_sinks.answers:random_checkpoint", config=model, folder=folder)
            model = folder
        options = {"trust_remote_code": trust_remote_code, "revision": engine.pop("revision", None)}
        reference = vllm_zygote.run(
            "vllm_tf_sinks.answers:answer_with_hugging_face",
            model=str(model),
            prompts=prompts,
            new_tokens=new_tokens,
            dtype=dtype,
            whole=LARGEST_WHOLE,
            **options,
        )
        allowed = parity.TOLERANCES[reference.dtype] if tolerance is None else tolerance
        engine = {"dtype": reference.dtype, "kv_cache_memory_bytes": SMALL_CACHE, **options, **engine}
        runs = [parity.serve(vllm_zygote, parity.ON, str(model), reference, allowed, engine, env=env)]
        if (comparison := runs[0].comparison) is None or runs[0].outcome != parity.AGREES:
            runs.append(parity.serve(vllm_zygote, parity.OFF, str(model), reference, allowed, engine, env=env))
            pytest.fail(f"{as_text(str(model), reference, runs, allowed)}\n\n{runs[0].log}".rstrip(), pytrace=False)
        return comparison

    return assert_parity
