# SPDX-License-Identifier: Apache-2.0
"""What the tests share: tiny checkpoints, one process a vLLM version, and the comparison."""
