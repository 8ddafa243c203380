# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-tf-sinks`. Importing this package imports neither torch nor vLLM, but a command may."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from vllm_tf_sinks.broken_install import is_broken_install, missing_package

COMMANDS = ("doctor", "inspect", "verify")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: the command and its arguments. None is those of the process.

    Returns:
        The exit status of the command; 1 if a package that it needs is missing.
    """
    try:
        return _main(arguments)
    except ImportError as error:
        if not is_broken_install(error):
            raise
        print(missing_package(error), file=sys.stderr)
        return 1


def _main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="vllm-tf-sinks",
        description="Attention sinks and models' own output heads for vLLM's Transformers modeling backend.",
    )
    parser.add_argument("--version", action="version", version=version("vllm-tf-sinks"))
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = importlib.import_module(f"{__name__}.{name}")
        formatter = argparse.RawDescriptionHelpFormatter
        text = command.__doc__ or ""
        sub = commands.add_parser(name, help=text.split("\n")[0], description=text, formatter_class=formatter)
        sub.add_argument("--json", action="store_true", help="print JSON")
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    # Only the command itself may write to standard output
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    status: int = options.run(options)
    return status
