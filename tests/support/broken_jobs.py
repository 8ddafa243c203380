# SPDX-License-Identifier: Apache-2.0
"""An installation that lacks a package which ours needs, and vLLM does not."""

import builtins
from unittest.mock import patch

from support.jobs import served_rows


def served_without(package: str, checkpoint: str, **engine) -> list:
    """The rows that are served where no module of this package can import `package`."""
    original = builtins.__import__

    def import_others(name, importer=None, *args, **kwargs):
        ours = ((importer or {}).get("__name__") or "").startswith("vllm_tf_sinks")
        if ours and name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return original(name, importer, *args, **kwargs)

    with patch.object(builtins, "__import__", import_others):
        return served_rows(checkpoint, **engine)


def doctor_without(package: str) -> tuple[int, str]:
    """The exit status of `doctor`, and what it prints, where `package` is missing."""
    import contextlib
    import io
    import sys

    sys.modules[package] = None
    from vllm_tf_sinks.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = main(["doctor"])
    return status, printed.getvalue()
