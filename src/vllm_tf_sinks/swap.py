# SPDX-License-Identifier: Apache-2.0
"""Let names mean something else for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def swapped(namespace: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    """Within the context, `namespace` holds `values` for names that it has already."""
    originals = {name: namespace[name] for name in values}
    namespace.update(values)
    try:
        yield
    finally:
        namespace.update(originals)
