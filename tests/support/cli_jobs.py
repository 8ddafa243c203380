# SPDX-License-Identifier: Apache-2.0
"""Commands run in a fork of a fork_server, where vLLM is imported already."""

import inspect
import tempfile
from contextlib import redirect_stdout


def command(arguments: list[str], tamper: str = "") -> tuple[int, str]:
    """The exit status of `vllm-tf-sinks *arguments`, and what it prints."""
    from support.jobs import call
    from vllm_tf_sinks.cli import main

    if tamper:
        call(tamper)
    # A true file: vLLM 0.29 asks standard output for its descriptor
    with tempfile.TemporaryFile("w+") as printed:
        with redirect_stdout(printed):
            status = main(arguments)
        printed.seek(0)
        return status, printed.read()


def with_tokenizer(name: str, folder: str, **changes) -> str:
    """Save a random `name` with a tokenizer of the words "0" to "127"."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    from support.checkpoints import SIZES, build

    build(name, folder, **changes)
    words = Tokenizer(WordLevel({str(token): token for token in range(SIZES["vocab_size"])}, unk_token="127"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="127").save_pretrained(folder)
    return folder


def reads_layout_of_experts() -> bool:
    """Whether vLLM serves experts whose weights are kept transposed, as it does from 0.33."""
    from vllm.model_executor.models.transformers.moe import MoEMixin

    return "is_transposed" in inspect.getsource(MoEMixin.recursive_replace)
