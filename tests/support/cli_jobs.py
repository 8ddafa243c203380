# SPDX-License-Identifier: Apache-2.0
"""Commands run in a fork of a zygote, where vLLM is imported already."""

import io
from contextlib import redirect_stdout


def command(arguments: list[str], tamper: str = "") -> tuple[int, str]:
    """The exit status of `vllm-tf-sinks *arguments`, and what it prints."""
    from support.jobs import call
    from vllm_tf_sinks.cli import main

    if tamper:
        call(tamper)
    with redirect_stdout(io.StringIO()) as printed:
        status = main(arguments)
    return status, printed.getvalue()
