# SPDX-License-Identifier: Apache-2.0
"""Call a function once, after the first import of a module."""

import sys
from collections.abc import Callable
from types import ModuleType

import wrapt

_waiting: set[str] = set()


def when_imported(module_name: str, action: Callable[[], None]) -> None:
    """Call `action` after the import of `module_name`, or now if it is imported. A second call has no effect before it.

    If `action` raises, the import raises the same error, and so does the next import.
    """
    if module_name in _waiting:
        return
    if module_name in sys.modules:
        action()
        return
    _waiting.add(module_name)

    def imported(_module: ModuleType) -> None:
        _waiting.discard(module_name)
        try:
            action()
        except BaseException:
            # vLLM may catch the error of a failed import, and import the module again
            sys.modules.pop(module_name, None)
            when_imported(module_name, action)
            raise

    wrapt.register_post_import_hook(imported, module_name)
