# SPDX-License-Identifier: Apache-2.0
"""Ask a server for a completion and its logprobs, by the openai client.

vllm serve MODEL --model-impl transformers
python examples/online_client.py [http://127.0.0.1:8000]
"""

import sys

import openai


def main(address: str = "http://127.0.0.1:8000") -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    model = client.models.list().data[0].id
    choice = client.completions.create(
        model=model, prompt="1 2 3 4 5 6", max_tokens=8, temperature=0, logprobs=1, extra_body={"ignore_eos": True}
    ).choices[0]
    for token, logprob in zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True):
        print(f"{token!r:>12} {logprob:8.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
