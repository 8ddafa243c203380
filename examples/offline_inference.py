# SPDX-License-Identifier: Apache-2.0
"""Complete a prompt with vLLM's Transformers backend, and show what the model thought of each token.

python examples/offline_inference.py MODEL
python examples/offline_inference.py MODEL '{"tensor_parallel_size": 2}'

MODEL is a folder or a name on the hub; what follows are options of vLLM's engine. Nothing here is about the
plugin: it is enough that it is installed.
"""

import json
import sys

from vllm import LLM, SamplingParams


def main(model: str, options: str = "{}") -> None:
    llm = LLM(model, model_impl="transformers", max_model_len=64, **json.loads(options))
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    (completion,) = llm.generate("1 2 3 4 5 6", sampling)[0].outputs
    for place in completion.logprobs:
        token = next(iter(place.values()))
        print(f"{token.decoded_token!r:>12} {token.logprob:8.4f}")


if __name__ == "__main__":  # workers are started by importing this file again
    main(*sys.argv[1:])
