# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin, to assert that a model served by vLLM's Transformers backend has Hugging Face's logprobs.

    def test_my_model(logprob_parity):
        logprob_parity("my-organisation/my-model")

pytest loads it once this package is installed. It imports slow modules only if a test uses `logprob_parity`.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vllm_tf_sinks.parity.compare import Comparison
    from vllm_tf_sinks.parity.fork_server import ForkServer

# Defaults for engines that generate a few tokens; variables of the environment come first
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # otherwise each engine compiles one small function for 10 to 20 s
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
IMPORTS = ("transformers", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.model_executor.models.registry")
LARGEST_VOCABULARY = 2**15  # the largest vocabulary size at which the logprobs of all tokens are compared
SMALL_CACHE = 2**26  # bytes of the KV cache of a tiny model; to clear a larger one takes seconds


def warm() -> None:
    """Prepare the fork server, after IMPORTS and before its first fork."""
    from vllm_tf_sinks import compat

    compat.engine.import_worker()
    compat.engine.inspect_models_in_this_process()


@pytest.fixture(scope="session")
def vllm_fork_server() -> "Iterator[ForkServer]":
    """A fork server that has imported vLLM. It starts when a test first uses it, and ends with the session."""
    from vllm_tf_sinks.parity.fork_server import ForkServer

    with ForkServer({**SETTINGS, **os.environ}, IMPORTS, f"{__name__}:warm") as fork_server:
        yield fork_server


@pytest.fixture
def logprob_parity(
    vllm_fork_server: "ForkServer", tmp_path_factory: pytest.TempPathFactory
) -> "Callable[..., Comparison]":
    """A function that serves a model with vLLM's Transformers backend, and fails unless it has Hugging Face's logprobs.

    It takes the arguments of `assert_parity` below.
    """

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
        """Compare the logprobs of a model served by vLLM with those of Hugging Face's eager code.

        Args:
            model: a folder, a hub id, or a config of Transformers, for which random weights are made.
            prompts: texts or lists of tokens. None is built-in texts, or random tokens without a tokenizer.
            new_tokens: the number of tokens to generate for each prompt.
            dtype: the dtype of both. `auto` is the checkpoint's.
            tolerance: the largest mean difference that agrees, in nats. None is `verify`'s for the dtype.
            trust_remote_code: whether to run code of the checkpoint.
            env: environment variables to serve the model with.
            engine: arguments of `vllm.LLM`.

        Returns:
            The comparison of the logprobs.

        Raises:
            AssertionError: if they differ or vLLM refuses the model. The message has the statistics, the places with
                the largest differences, and the same for vLLM with the plugin off.
        """
        __tracebackhide__ = True
        from vllm_tf_sinks.cli.verify import as_text
        from vllm_tf_sinks.parity import compare

        if not isinstance(model, (str, Path)):
            folder = str(tmp_path_factory.mktemp("checkpoint"))
            vllm_fork_server.run("vllm_tf_sinks.parity.logprobs:random_checkpoint", config=model, folder=folder)
            model = folder
        options = {"trust_remote_code": trust_remote_code, "revision": engine.pop("revision", None)}
        reference = vllm_fork_server.run(
            "vllm_tf_sinks.parity.logprobs:hugging_face_logprobs",
            model=str(model),
            prompts=prompts,
            new_tokens=new_tokens,
            dtype=dtype,
            largest_vocabulary=LARGEST_VOCABULARY,
            **options,
        )
        allowed = compare.TOLERANCES[reference.dtype] if tolerance is None else tolerance
        engine = {"dtype": reference.dtype, "kv_cache_memory_bytes": SMALL_CACHE, **options, **engine}
        runs = [compare.run_vllm(vllm_fork_server, compare.ON, str(model), reference, allowed, engine, env=env)]
        if (comparison := runs[0].comparison) is None or runs[0].outcome != compare.AGREES:
            runs.append(
                compare.run_vllm(vllm_fork_server, compare.OFF, str(model), reference, allowed, engine, env=env)
            )
            pytest.fail(f"{as_text(str(model), reference, runs, allowed)}\n\n{runs[0].log}".rstrip(), pytrace=False)
        return comparison

    return assert_parity
